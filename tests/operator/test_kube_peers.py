"""Replicas that read each other's memory: flags, own address, ports, policies; nothing unless asked for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from kvist_connector import names
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.settings import add_flags, load
from kvist_operator.plan import cpu_target, make_plan
from kvist_operator.render.local import Machine, render
from kvist_operator.testing import CONTEXT, cluster, rendered

PEERS = {"peers": {"enabled": True}}


def agent(**cache: Any) -> dict[str, Any]:
    objects = rendered(cluster(cache=cache), CONTEXT)
    pod = objects["StatefulSet", "test-engine"]["spec"]["template"]["spec"]
    (found,) = [item for item in pod["initContainers"] if item["name"] == "agent"]
    return dict(found)


def test_every_agent_is_told_the_name_of_all_and_its_own_address() -> None:
    container = agent(**PEERS)
    pod_ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    assert pod_ip in container["env"]
    assert {"name": "peer", "containerPort": names.PORT_PEER, "protocol": "TCP"} in container["ports"]
    parser = argparse.ArgumentParser()
    add_flags(parser, AgentSettings)
    # As Kubernetes fills them in; the token file is what allows to listen everywhere.
    argv = [
        text.replace("$(POD_IP)", "10.0.0.7").replace("$(POD_NAME)", "test-engine-0")
        for text in container["args"][2:]
    ]
    peer = load(AgentSettings, parser.parse_args(argv), {}, names.ENV_AGENT).peer
    assert (peer.host, peer.port) == ("0.0.0.0", names.PORT_PEER)
    assert peer.urls == (f"http://test-engine.{CONTEXT.namespace}.svc:{names.PORT_PEER}",)
    assert peer.address == f"http://10.0.0.7:{names.PORT_PEER}"


def test_only_engines_of_the_cluster_reach_the_port() -> None:
    security = {"networkPolicy": {"egress": True}}
    objects = rendered(cluster(cache=PEERS, security=security), CONTEXT)
    policy = objects["NetworkPolicy", "test-engine"]["spec"]
    (rule,) = [r for r in policy["ingress"] if r["ports"][0]["port"] == names.PORT_PEER]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "engine"
    assert names.PORT_PEER in [r["ports"][0]["port"] for r in policy["egress"] if "ports" in r]


@pytest.mark.parametrize("cache", [{}, {"peers": {"enabled": False}}, {**PEERS, "memory": 0}])
def test_nothing_is_opened_where_nothing_is_asked_for(cache: dict[str, Any]) -> None:
    container = agent(**cache)
    assert not [text for text in container["args"] if text.startswith("--peer.")]
    assert "POD_IP" not in [variable["name"] for variable in container["env"]]
    objects = rendered(cluster(cache=cache), CONTEXT)
    rules = objects["NetworkPolicy", "test-engine"]["spec"]["ingress"]
    assert names.PORT_PEER not in [rule["ports"][0]["port"] for rule in rules]


def test_on_one_machine_each_agent_has_a_port_of_its_own() -> None:
    machine = Machine(
        run_dir=Path("/run/kvist/test"),
        arena_dir=Path("/dev/shm"),
        host="127.0.0.1",
        ports={"router": 8080, "router-admin": 8081, "engine": 8100, "agent": 8200, "peer": 8300},
        python="python3",
        model="/models/m",
    )
    wanted = cluster(cache=PEERS, engine={"replicas": 2})
    processes = render(make_plan(wanted, cpu_target(2, offline=True)), machine)
    parser = argparse.ArgumentParser()
    add_flags(parser, AgentSettings)
    for number in range(2):
        (agent,) = [process for process in processes if process.name == f"agent-{number}"]
        assert agent.ports == {"agent": 8200 + number, "peer": 8300 + number}
        peer = load(AgentSettings, parser.parse_args(agent.argv[3:]), {}, names.ENV_AGENT).peer
        assert (peer.host, peer.port) == ("127.0.0.1", 8300 + number)
        assert peer.urls == ("http://127.0.0.1:8300", "http://127.0.0.1:8301")
        assert peer.address == peer.urls[number]
