"""The real kinds of the Prometheus operator: used from when they are there, and never missed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvist_operator.control import reasons
from kvist_operator.control.resources import OPTIONAL_KINDS
from kvist_operator.plan import make_plan
from kvist_operator.plan.target import kube_target
from kvist_operator.render.kube import Context, Images, render
from kvist_operator.spec.cluster import load
from testbed.kube import Kubectl
from testbed.monitoring import KINDS, monitoring_kinds
from testbed.operator_process import operator
from testbed.programs import CHECKOUT
from testbed.release import ACCOUNT, CHART, Helm, values
from testbed.scenario import cache_cluster
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_api, pytest.mark.usefixtures("crd")]
EXAMPLE = CHECKOUT / "examples" / "minimal-cpu.yaml"
STRICT = ("create", "--dry-run=server", "--validate=strict", "--warnings-as-errors", "--filename=-")


@pytest.fixture
def installed(kubectl: Kubectl) -> Iterator[None]:
    with monitoring_kinds(kubectl):
        yield


def monitors(kubectl: Kubectl, namespace: str) -> set[str]:
    """Kind and name of what belongs to the cluster."""
    found = kubectl.get(
        ",".join(KINDS), f"--namespace={namespace}", "--selector=app.kubernetes.io/instance=demo"
    )
    return {f"{item['kind']}/{item['metadata']['name']}" for item in found["items"]} if found else set()


# What a spec that cannot be carried out says; that pods of this test do not start is another matter.
BLOCKED = {reasons.REFUSED, reasons.FORBIDDEN, reasons.INTERNAL, reasons.INVALID_SPEC}


def seen(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    """Conditions that are about the cluster as it is now."""
    found = kubectl.get("cc/demo", f"--namespace={namespace}")
    listed = found.get("status", {}).get("conditions", [])
    return {c["type"]: c for c in listed if c["observedGeneration"] == found["metadata"]["generation"]}


def test_they_are_rendered_when_they_appear_and_not_missed_when_they_go(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    def log() -> str:
        return f"{seen(kubectl, namespace)}\n{process.log.read_text()[-2000:]}"

    def apply(replicas: int) -> None:
        manifest = yaml.safe_dump(cache_cluster("demo", replicas=replicas))
        kubectl("apply", f"--namespace={namespace}", "--filename=-", stdin=manifest)
        until("a status", lambda: "Ready" in seen(kubectl, namespace), 60, log)

    with operator(kubectl, namespace, tmp_path, "first", "--sweep-seconds=1") as process:
        apply(1)
        assert seen(kubectl, namespace)["Degraded"]["reason"] not in BLOCKED
        wanted = {"PodMonitor/demo-engine", "PodMonitor/demo-router", "PrometheusRule/demo-cluster"}
        with monitoring_kinds(kubectl):
            until("the monitors", lambda: monitors(kubectl, namespace) == wanted, 60, log)
            owner = kubectl.get("cc/demo", f"--namespace={namespace}")["metadata"]["uid"]
            rule = kubectl.get("prometheusrule/demo-cluster", f"--namespace={namespace}")
            assert rule["metadata"]["ownerReferences"][0]["uid"] == owner
        apply(2)
        assert seen(kubectl, namespace)["Degraded"]["reason"] not in BLOCKED


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kinds", [OPTIONAL_KINDS, OPTIONAL_KINDS - {"PodMonitor"}], ids=["pods", "services"])
def test_their_schemas_accept_what_a_cluster_renders(
    kubectl: Kubectl, namespace: str, kinds: frozenset[str]
) -> None:
    cluster = load(EXAMPLE)
    context = Context(namespace, "0", Images("a:1", "b:1", "a:1", "c:1"), kinds)
    objects = render(cluster, make_plan(cluster, kube_target(cluster)), context)
    mine = [item for item in objects if item["kind"] in kinds]
    said = kubectl(*STRICT, f"--namespace={namespace}", stdin=yaml.safe_dump_all(mine))
    assert len(said.splitlines()) == len(mine) == 3


@pytest.mark.usefixtures("installed")
def test_the_charts_own_monitor_and_alerts_are_accepted(kubectl: Kubectl, namespace: str) -> None:
    given = values(namespace, metrics={"podMonitor": True, "prometheusRule": True})
    text = Helm(kubectl)(
        "template", ACCOUNT, str(CHART), f"--namespace={namespace}", "--values=-", stdin=json.dumps(given)
    )
    mine = [item for item in yaml.safe_load_all(text) if item and item["kind"] in OPTIONAL_KINDS]
    said = kubectl(*STRICT, f"--namespace={namespace}", stdin=yaml.safe_dump_all(mine))
    assert len(said.splitlines()) == len(mine) == 2
