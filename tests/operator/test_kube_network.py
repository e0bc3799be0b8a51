"""Who may connect to whom, what is scraped, and which alerts and graphs there are."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvist_connector import names
from kvist_operator.render.kube import Context
from kvist_operator.render.kube.alerts import ALERTS
from kvist_operator.render.kube.dashboard import PANELS
from kvist_operator.testing import CONTEXT, cluster, rendered

ROOT = Path(__file__).parents[2]
MONITORING = frozenset({"PodMonitor", "ServiceMonitor", "PrometheusRule"})
REDIS = {"remote": {"redis": {"managed": {}}}}


def objects_of(context: Context = CONTEXT, **sections: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return rendered(cluster(**sections), context)


def admitted(policy: dict[str, Any]) -> dict[int, set[str]]:
    """Port -> who: a component, `anyone`, or the label of a pod elsewhere."""
    return {
        rule["ports"][0]["port"]: {_who(peer) for peer in rule["from"]} if "from" in rule else {"anyone"}
        for rule in policy["spec"]["ingress"]
    }


def _who(peer: dict[str, Any]) -> str:
    labels = peer["podSelector"]["matchLabels"]
    return str(labels.get("app.kubernetes.io/component") or labels["app.kubernetes.io/name"])


def test_each_part_accepts_only_those_who_need_it() -> None:
    objects = objects_of(cache=REDIS)
    assert admitted(objects["NetworkPolicy", "test-engine"]) == {
        names.PORT_ENGINE: {"router", "prometheus"},
        names.PORT_AGENT: {"router", "engine", "kvist-operator", "prometheus"},
    }
    assert admitted(objects["NetworkPolicy", "test-router"]) == {
        names.PORT_ROUTER: {"anyone"},
        names.PORT_ROUTER_ADMIN: {"kvist-operator", "prometheus"},
        names.PORT_ROUTER_NEIGHBOURS: {"router"},
    }
    assert admitted(objects["NetworkPolicy", "test-redis"]) == {names.PORT_REDIS: {"engine"}}


def test_peers_of_the_same_name_in_another_cluster_are_not_admitted() -> None:
    policy = objects_of()["NetworkPolicy", "test-engine"]["spec"]
    for rule in policy["ingress"]:
        for peer in rule["from"]:
            if "namespaceSelector" not in peer:
                assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "test"


def test_clients_and_scrapers_can_be_named_and_the_operators_namespace_is_known() -> None:
    clients, scrapers = (
        [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
        [{"ipBlock": {"cidr": "192.0.2.1/32"}}],
    )
    policy = {"networkPolicy": {"clients": clients, "metricsFrom": scrapers}}
    objects = objects_of(replace(CONTEXT, operator_namespace="kvist-system"), security=policy)
    first, second, _ = objects["NetworkPolicy", "test-router"]["spec"]["ingress"]
    assert first["from"] == clients
    assert second["from"][1:] == scrapers
    assert second["from"][0]["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "kvist-system"}
    }


def test_egress_is_restricted_on_request_to_what_a_part_needs() -> None:
    assert objects_of()["NetworkPolicy", "test-engine"]["spec"]["policyTypes"] == ["Ingress"]
    hub = [{"ipBlock": {"cidr": "192.0.2.0/24"}}]
    wished = {"networkPolicy": {"egress": True, "egressTo": hub}}
    objects = objects_of(cache=REDIS, security=wished)
    engine = objects["NetworkPolicy", "test-engine"]["spec"]
    assert engine["policyTypes"] == ["Ingress", "Egress"]
    ports = [rule["ports"][0]["port"] for rule in engine["egress"] if "ports" in rule]
    assert ports == [names.PORT_AGENT, names.PORT_REDIS, 53]
    assert engine["egress"][-1] == {"to": hub}
    assert objects["NetworkPolicy", "test-redis"]["spec"]["egress"] == []


def test_policies_can_be_left_out() -> None:
    objects = objects_of(security={"networkPolicy": {"enabled": False}})
    assert not [kind for kind, _ in objects if kind == "NetworkPolicy"]


def test_monitoring_objects_are_rendered_where_their_kinds_exist() -> None:
    def kinds(*present: str) -> set[str]:
        return {kind for kind, _ in objects_of(replace(CONTEXT, kinds=frozenset(present)))}

    assert not kinds() & MONITORING
    assert kinds(*MONITORING) & MONITORING == {"PodMonitor", "PrometheusRule"}
    assert kinds("ServiceMonitor") & MONITORING == {"ServiceMonitor"}
    off = {"podMonitor": False, "prometheusRule": False, "dashboard": False}
    assert not {k for k, _ in objects_of(replace(CONTEXT, kinds=MONITORING), monitoring=off)} & MONITORING


def test_the_agents_metrics_are_scraped_with_its_token() -> None:
    monitor = objects_of(replace(CONTEXT, kinds=MONITORING))["PodMonitor", "test-engine"]["spec"]
    by_port = {item["port"]: item for item in monitor["podMetricsEndpoints"]}
    assert by_port["agent"]["authorization"]["credentials"] == {"name": "test-token", "key": "token"}
    assert by_port["engine"]["interval"] == "15s"


def test_a_service_monitor_finds_its_ports() -> None:
    objects = objects_of(replace(CONTEXT, kinds=frozenset({"ServiceMonitor"})))
    monitor = objects["ServiceMonitor", "test-router"]["spec"]
    (port,) = [item["port"] for item in monitor["endpoints"]]
    offered = [p["name"] for p in objects["Service", "test-router-admin"]["spec"]["ports"]]
    assert port in offered


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_runbook(alert: Any) -> None:
    rules = objects_of(replace(CONTEXT, kinds=MONITORING))["PrometheusRule", "test-cluster"]["spec"][
        "groups"
    ][0]
    rule = next(item for item in rules["rules"] if item["alert"] == alert.name)
    page, anchor = rule["annotations"]["runbook_url"].split("#")
    headings = re.findall(r"^## (.+)$", (ROOT / page).read_text(), re.M)
    assert anchor in [heading.lower() for heading in headings]


def test_every_metric_that_is_shown_or_watched_exists() -> None:
    known = set(re.findall(r"^\| `(kvist_\w+)`", (ROOT / "docs" / "reference.md").read_text(), re.M))
    used = {
        name
        for text in (*(alert.expression for alert in ALERTS), *(panel.expression for panel in PANELS))
        for name in re.findall(r"kvist_\w+", text)
    }
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in used} - known == set()


def test_the_dashboard_shows_one_cluster_only() -> None:
    context = replace(CONTEXT, kinds=MONITORING)
    data = objects_of(context)["ConfigMap", "test-cluster-dashboard"]["data"]
    (text,) = data.values()
    for panel in json.loads(text)["panels"]:
        for target in panel["targets"]:
            assert 'app_kubernetes_io_instance="test"' in target["expr"]
            assert "@" not in target["expr"]
