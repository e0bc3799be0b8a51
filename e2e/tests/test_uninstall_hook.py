"""The chart's pre-delete hook: clusters that wait for an operator are freed before it goes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from testbed.kube import Kubectl
from testbed.release import Helm, refusals, released
from testbed.scenario import cache_cluster
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_pod, pytest.mark.usefixtures("node", "crd"), pytest.mark.timeout(600)]
FINALIZER = "kvist.dev/clear-shared-tiers"
HOOK = "kvist-release"


def cleared() -> dict[str, Any]:
    """A cluster without engines that wants its Redis cleared."""
    remote = {"redis": {"urls": ["redis://cache:6379"]}, "whenDeleted": "Clear"}
    manifest = cache_cluster("demo", remote=remote)
    manifest["spec"]["engine"]["replicas"] = 0
    return manifest


def test_a_cluster_outlives_its_operator_and_can_be_deleted(kubectl: Kubectl, namespace: str) -> None:
    where = f"--namespace={namespace}"
    with released(Helm(kubectl), namespace):
        kubectl("apply", where, "--filename=-", stdin=yaml.safe_dump(cleared()))
        until(
            "the finalizer",
            lambda: kubectl.get("cc/demo", where)["metadata"].get("finalizers") == [FINALIZER],
            60,
        )
        assert refusals(kubectl, namespace) == []
    assert "finalizers" not in kubectl.get("cc/demo", where)["metadata"]
    assert refusals(kubectl, namespace, HOOK) == []
    kinds = "job,serviceaccount,role,rolebinding"
    assert kubectl.listed(kinds, where, "--selector=app.kubernetes.io/name=kvist-release") == []
    kubectl("delete", "cc/demo", where, "--timeout=30s")
