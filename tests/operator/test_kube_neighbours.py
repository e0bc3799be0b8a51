"""Routers that tell each other what they send: their name, their port, their token, and who may connect."""

from __future__ import annotations

from typing import Any

import yaml

from kvist_connector import names
from kvist_connector.settings import validate
from kvist_operator.plan import cpu_target, make_plan
from kvist_operator.render.kube.pods import TOKEN_FILE
from kvist_operator.testing import CONTEXT, cluster, rendered
from kvist_router.settings import RouterSettings

SERVICE = ("Service", "test-router-neighbours")


def objects_of(**sections: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return rendered(cluster(**sections), CONTEXT)


def settings(objects: dict[tuple[str, str], dict[str, Any]]) -> RouterSettings:
    text = objects["ConfigMap", "test-router"]["data"]["router.yaml"]
    return validate(RouterSettings, yaml.safe_load(text), "router.yaml")


def test_every_router_is_told_the_name_of_all_and_listens_for_them() -> None:
    objects = objects_of()
    found = settings(objects)
    assert (found.neighbours.host, found.neighbours.port) == ("0.0.0.0", names.PORT_ROUTER_NEIGHBOURS)
    assert found.neighbours.urls == (
        f"http://test-router-neighbours.{CONTEXT.namespace}.svc:{names.PORT_ROUTER_NEIGHBOURS}",
    )
    assert str(found.agent.token_file) == TOKEN_FILE
    service = objects[SERVICE]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"]
    pod = objects["Deployment", "test-router"]["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    (port,) = service["ports"]
    assert ports[port["targetPort"]] == port["port"] == names.PORT_ROUTER_NEIGHBOURS
    assert all(len(name) <= 15 for name in ports)  # as a container's ports are limited to


def test_only_routers_of_the_cluster_reach_the_port() -> None:
    objects = objects_of(security={"networkPolicy": {"egress": True}})
    policy = objects["NetworkPolicy", "test-router"]["spec"]
    (rule,) = [r for r in policy["ingress"] if r["ports"][0]["port"] == names.PORT_ROUTER_NEIGHBOURS]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/name": "kvist",
        "app.kubernetes.io/instance": "test",
        "app.kubernetes.io/component": "router",
    }
    assert names.PORT_ROUTER_NEIGHBOURS in [r["ports"][0]["port"] for r in policy["egress"] if "ports" in r]


def test_without_agents_there_is_no_token_and_nothing_is_opened() -> None:
    objects = objects_of(cache={"enabled": False})
    assert SERVICE not in objects
    assert settings(objects).neighbours.port is None
    policy = objects["NetworkPolicy", "test-router"]["spec"]
    assert names.PORT_ROUTER_NEIGHBOURS not in [rule["ports"][0]["port"] for rule in policy["ingress"]]


def test_one_router_on_one_machine_has_no_neighbours() -> None:
    router = make_plan(cluster(), cpu_target(2, offline=True)).router
    assert "neighbours" not in router.files["router.yaml"]
    assert router.ports == ("router", "router-admin")
