"""The operator on a real API server, without pods: what it makes, repairs, reports and leaves alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.kube import Kubectl
from testbed.operator_process import OperatorProcess, leader, operator
from testbed.scenario import cache_cluster
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_api, pytest.mark.usefixtures("crd")]
TAKEOVER_SECONDS = 20  # what users are promised
CHILDREN = "statefulset,deployment,service,configmap,secret,serviceaccount,networkpolicy,poddisruptionbudget"


@pytest.fixture
def running(kubectl: Kubectl, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    with operator(kubectl, namespace, tmp_path, "first") as process:
        yield process


def apply(kubectl: Kubectl, namespace: str, manifest: dict[str, Any]) -> None:
    kubectl("apply", f"--namespace={namespace}", "--filename=-", stdin=yaml.safe_dump(manifest))


def status(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    found = kubectl.get("cc/demo", f"--namespace={namespace}")
    conditions = found.get("status", {}).get("conditions", [])
    current = [c for c in conditions if c.get("observedGeneration") == found["metadata"]["generation"]]
    return {condition["type"]: condition for condition in current}


def settled(kubectl: Kubectl, namespace: str, condition: str, value: str) -> dict[str, Any]:
    """Wait for a condition of the current generation."""

    def holds() -> bool:
        return status(kubectl, namespace).get(condition, {}).get("status") == value

    until(f"{condition}={value}", holds, 60, lambda: str(status(kubectl, namespace)))
    return status(kubectl, namespace)[condition]


def children(kubectl: Kubectl, namespace: str) -> dict[str, str]:
    """Kind and name -> the uid, of what belongs to the cluster."""
    selector = "app.kubernetes.io/instance=demo"
    items = kubectl.listed(CHILDREN, f"--namespace={namespace}", f"--selector={selector}")
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["uid"] for item in items}


def test_a_cluster_becomes_its_children_and_says_what_it_waits_for(
    kubectl: Kubectl, namespace: str, running: OperatorProcess
) -> None:
    apply(kubectl, namespace, cache_cluster("demo"))
    assert settled(kubectl, namespace, "Ready", "False")["message"]
    made = children(kubectl, namespace)
    assert {"StatefulSet/demo-engine", "Deployment/demo-router", "Service/demo-router"} <= set(made)
    owner = kubectl.get("cc/demo", f"--namespace={namespace}")["metadata"]["uid"]
    engines = kubectl.get("statefulset/demo-engine", f"--namespace={namespace}")
    assert engines["metadata"]["ownerReferences"][0]["uid"] == owner


def test_a_deleted_child_comes_back_and_a_changed_one_is_changed_back(
    kubectl: Kubectl, namespace: str, running: OperatorProcess
) -> None:
    apply(kubectl, namespace, cache_cluster("demo"))
    settled(kubectl, namespace, "Ready", "False")
    before = children(kubectl, namespace)
    kubectl("delete", "service/demo-router", f"--namespace={namespace}")
    kubectl("patch", "deployment/demo-router", f"--namespace={namespace}", "--type=merge",
            '--patch={"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}}')  # fmt: skip

    def repaired() -> bool:
        grace = kubectl.get("deployment/demo-router", f"--namespace={namespace}")["spec"]["template"]["spec"]
        service = children(kubectl, namespace).get("Service/demo-router")
        known = service not in (None, before["Service/demo-router"])
        return known and grace["terminationGracePeriodSeconds"] > 1

    until("the repair", repaired, 60, lambda: running.log.read_text()[-2000:])


def test_a_bad_pod_template_is_reported_and_the_children_stay(
    kubectl: Kubectl, namespace: str, running: OperatorProcess
) -> None:
    apply(kubectl, namespace, cache_cluster("demo"))
    settled(kubectl, namespace, "Ready", "False")
    before = children(kubectl, namespace)
    twice = {"spec": {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]}}
    wrong = cache_cluster("demo")
    wrong["spec"]["router"]["podTemplate"] = twice
    apply(kubectl, namespace, wrong)
    message = settled(kubectl, namespace, "Degraded", "True")["message"]
    assert "spec.router.podTemplate" in message
    assert children(kubectl, namespace) == before


def test_deleting_the_cluster_deletes_its_children(
    kubectl: Kubectl, namespace: str, running: OperatorProcess
) -> None:
    apply(kubectl, namespace, cache_cluster("demo"))
    settled(kubectl, namespace, "Ready", "False")
    kubectl("delete", "cc/demo", f"--namespace={namespace}", "--timeout=30s")
    until("no children", lambda: not children(kubectl, namespace), 60)


def test_nothing_hangs_when_the_operator_is_gone_first(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    with operator(kubectl, namespace, tmp_path, "first"):
        apply(kubectl, namespace, cache_cluster("demo"))
        settled(kubectl, namespace, "Ready", "False")
    kubectl("delete", "namespace", namespace, "--timeout=60s", seconds=70)


def test_another_operator_takes_over_from_a_killed_one(
    kubectl: Kubectl, namespace: str, running: OperatorProcess, tmp_path: Path
) -> None:
    until("the first leads", lambda: leader(kubectl, namespace) == "first", 30)
    with operator(kubectl, namespace, tmp_path, "second"):
        running.kill()
        began = time.monotonic()
        until("the takeover", lambda: leader(kubectl, namespace) == "second", TAKEOVER_SECONDS)
        print(f"takeover after {time.monotonic() - began:.1f} s")
        apply(kubectl, namespace, cache_cluster("demo"))
        assert settled(kubectl, namespace, "Ready", "False")["message"]
