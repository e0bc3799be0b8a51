"""The chart's life: install, helm test, upgrade, uninstall with clusters still there. No engine runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from testbed.kube import Kubectl
from testbed.release import ACCOUNT, CHART, Helm, refusals, released, said, values
from testbed.scenario import cache_cluster
from testbed.tenancy import tenant
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_pod, pytest.mark.usefixtures("node", "crd"), pytest.mark.timeout(600)]


def without_engines() -> dict[str, Any]:
    """A cluster whose pods are made and cannot start."""
    manifest = cache_cluster("demo")
    manifest["spec"]["engine"]["image"] = "kvist.dev/missing:e2e"
    del manifest["spec"]["engine"]["podTemplate"]
    return manifest


def reason(kubectl: Kubectl, namespace: str) -> str:
    """What the cluster's Ready condition says."""
    status = kubectl.get("cc/demo", f"--namespace={namespace}").get("status", {})
    ready = [c for c in status.get("conditions", []) if c["type"] == "Ready"]
    return f"{ready[0]['status']} {ready[0]['reason']}" if ready else ""


def serve(helm: Helm, release: str, namespace: str) -> None:
    """The release in one namespace passes its own test and takes up a cluster of another, or of its own."""
    assert "Succeeded" in helm("test", ACCOUNT, f"--namespace={release}", "--timeout=90s")
    manifest = yaml.safe_dump(without_engines())
    helm.kubectl("apply", f"--namespace={namespace}", "--filename=-", stdin=manifest)
    until(
        "a status",
        lambda: reason(helm.kubectl, namespace).startswith("False"),
        60,
        lambda: said(helm.kubectl, release),
    )


def test_a_release_is_tested_upgraded_and_uninstalled_before_its_clusters(
    kubectl: Kubectl, namespace: str
) -> None:
    helm = Helm(kubectl)
    with released(helm, namespace):
        serve(helm, namespace, namespace)
        before = kubectl.get("statefulset/demo-engine", f"--namespace={namespace}")
        helm("upgrade", ACCOUNT, str(CHART), f"--namespace={namespace}", "--values=-", "--wait",
             "--timeout=120s", stdin=json.dumps(values(namespace, logLevel="debug")))  # fmt: skip
        after = kubectl.get("statefulset/demo-engine", f"--namespace={namespace}")
        assert after["metadata"]["generation"] == before["metadata"]["generation"]
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        assert refusals(kubectl, namespace) == []
    # The operator is gone, the cluster is not: it can be deleted, and its children with it.
    assert kubectl.get("statefulset/demo-engine", f"--namespace={namespace}") is not None
    kubectl("delete", "cc/demo", f"--namespace={namespace}", "--timeout=30s")
    until("no engines", lambda: not kubectl.get("statefulset/demo-engine", f"--namespace={namespace}"), 60)


def test_cluster_wide_a_release_serves_other_namespaces(kubectl: Kubectl, namespace: str) -> None:
    helm = Helm(kubectl)
    with tenant(kubectl) as elsewhere, released(helm, namespace, watchNamespaces=[], replicas=2):
        serve(helm, namespace, elsewhere)
        kubectl("delete", "cc/demo", f"--namespace={elsewhere}", "--timeout=30s")
        assert refusals(kubectl, namespace) == []


def test_the_chart_lints(kubectl: Kubectl) -> None:
    assert "0 chart(s) failed" in Helm(kubectl)("lint", "--strict", str(CHART))


def test_an_unknown_value_is_refused_by_name(kubectl: Kubectl, namespace: str) -> None:
    with pytest.raises(Exception, match="replicaz"), released(Helm(kubectl), namespace, replicaz=2):
        pass
