"""TLS between routers, agents and peers: what programs are told, whence files come, how agents are asked."""

from __future__ import annotations

import datetime
from typing import Any

import yaml

from kvist_connector.agent.settings import AgentSettings
from kvist_connector.settings import validate
from kvist_operator.control.pods import pod_of
from kvist_operator.testing import CONTEXT, cluster, rendered
from kvist_router.settings import RouterSettings

SECRETS = {
    "certificate": {"name": "agents", "key": "tls.crt"},
    "privateKey": {"name": "agents", "key": "tls.key"},
    "ca": {"name": "authority", "key": "ca.crt"},
}
SPEC: dict[str, Any] = {"security": {"agentTls": SECRETS}, "cache": {"peers": {"enabled": True}}}
FOLDER = "/etc/kvist/agent-tls"
FILES = {
    "tls.crt": ("agents", "tls.crt"),
    "tls.key": ("agents", "tls.key"),
    "ca.crt": ("authority", "ca.crt"),
}


def pod(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = rendered(cluster(**spec), CONTEXT)[kind, name]["spec"]["template"]["spec"]
    return found


def agent(body: dict[str, Any]) -> dict[str, Any]:
    return next(item for item in body["initContainers"] if item["name"] == "agent")


def mounted(body: dict[str, Any]) -> dict[str, tuple[str, str]]:
    (volume,) = (item for item in body["volumes"] if item["name"] == "agent-tls")
    return {
        item["path"]: (source["secret"]["name"], item["key"])
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }


def test_agents_and_routers_show_the_same_certificate_from_the_users_secrets() -> None:
    engines, routers = pod("StatefulSet", "test-engine", **SPEC), pod("Deployment", "test-router", **SPEC)
    assert mounted(engines) == mounted(routers) == FILES
    mount = {"name": "agent-tls", "mountPath": FOLDER, "readOnly": True}
    assert mount in agent(engines)["volumeMounts"]
    assert mount in routers["containers"][0]["volumeMounts"]
    (engine,) = (item for item in engines["containers"] if item["name"] == "engine")
    assert mount not in engine["volumeMounts"]


def test_both_programs_take_what_they_are_told() -> None:
    arguments = agent(pod("StatefulSet", "test-engine", **SPEC))["args"]
    given = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    tls = {
        name.removeprefix("--tls.").replace("-", "_"): value
        for name, value in given.items()
        if name.startswith("--tls.")
    }
    told = {"replica": "r", "socket": "/s", "arena": "/a", "tls": tls}
    found = validate(AgentSettings, told).tls
    assert (str(found.certificate_file), str(found.ca_file)) == (f"{FOLDER}/tls.crt", f"{FOLDER}/ca.crt")
    assert found.clients == "token"  # which is what the operator has
    files = rendered(cluster(**SPEC), CONTEXT)["ConfigMap", "test-router"]["data"]
    router = validate(RouterSettings, yaml.safe_load(files["router.yaml"])).agent
    assert (str(router.tls.key_file), str(router.token_file)) == (
        f"{FOLDER}/tls.key",
        "/etc/kvist/token/token",
    )
    assert router.tls.name == found.name


def test_probes_scrapes_and_the_operator_ask_over_tls() -> None:
    body = pod("StatefulSet", "test-engine", **SPEC)
    for probe in ("startupProbe", "livenessProbe"):
        assert agent(body)[probe]["httpGet"]["scheme"] == "HTTPS"
    found = pod_of({"metadata": {"name": "e-0", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
                    "spec": body}, "engine", datetime.datetime.now(datetime.UTC))  # fmt: skip
    assert found.tls == {"agent"}


def test_without_it_nothing_has_tls() -> None:
    body = pod("StatefulSet", "test-engine")
    assert not [argument for argument in agent(body)["args"] if argument.startswith("--tls")]
    assert "scheme" not in agent(body)["startupProbe"]["httpGet"]
    assert "agent-tls" not in [item["name"] for item in body["volumes"]]
    assert "tls" not in rendered(cluster(), CONTEXT)["ConfigMap", "test-router"]["data"]["router.yaml"]


def test_plain_engines_need_none() -> None:
    spec = {"security": {"agentTls": SECRETS}, "cache": {"enabled": False}}
    for kind, name in (("StatefulSet", "test-engine"), ("Deployment", "test-router")):
        assert "agent-tls" not in [item["name"] for item in pod(kind, name, **spec)["volumes"]]
