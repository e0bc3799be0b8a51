"""cache.remote.whenDeleted: Clear on a real API server: deletion waits for the operator, and never hangs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.kube import Kubectl
from testbed.operator_process import leader, operator
from testbed.programs import CHECKOUT
from testbed.scenario import cache_cluster
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_api, pytest.mark.usefixtures("crd"), pytest.mark.timeout(240)]
FINALIZER = "kvist.dev/clear-shared-tiers"


def apply(kubectl: Kubectl, namespace: str, **remote: Any) -> None:
    """A cluster without engines, so that no agent could be asked with or without a node."""
    manifest = cache_cluster("demo", remote={"redis": {"urls": ["redis://cache:6379"]}, **remote})
    manifest["spec"]["engine"]["replicas"] = 0
    kubectl("apply", f"--namespace={namespace}", "--filename=-", stdin=yaml.safe_dump(manifest))


def finalizers(kubectl: Kubectl, namespace: str) -> list[str]:
    found = kubectl.get("cc/demo", f"--namespace={namespace}")
    return list(found["metadata"].get("finalizers", []))


def marked(kubectl: Kubectl, namespace: str) -> None:
    until("the finalizer", lambda: finalizers(kubectl, namespace) == [FINALIZER], 60)


def release(kubectl: Kubectl, namespace: str) -> None:
    """What the chart's hook runs, once the operator has ended."""
    flags = [f"--namespace={namespace}", f"--watch-namespaces=[{namespace}]"]
    subprocess.run(
        [CHECKOUT / ".venv" / "bin" / "python", "-m", "kvist_operator", "release", *flags],
        env={**os.environ, "KUBECONFIG": str(kubectl.bed.kubeconfig)},
        check=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_the_finalizer_comes_and_goes_with_the_spec_and_deletion_says_what_stays(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    with operator(kubectl, namespace, tmp_path, "first"):
        apply(kubectl, namespace, whenDeleted="Clear")
        marked(kubectl, namespace)
        apply(kubectl, namespace, whenDeleted="Retain")
        until("no finalizer", lambda: finalizers(kubectl, namespace) == [], 60)
        apply(kubectl, namespace, whenDeleted="Clear")
        marked(kubectl, namespace)
        kubectl("delete", "cc/demo", f"--namespace={namespace}", "--timeout=90s", seconds=100)
        events = kubectl.listed("events", f"--namespace={namespace}")
        (said,) = [event["message"] for event in events if event["reason"] == "ChunksStay"]
        assert said.startswith("chunks stay in the shared tiers: no agent is left that could clear them")


def test_a_namespace_is_deleted_under_it(kubectl: Kubectl, namespace: str, tmp_path: Path) -> None:
    with operator(kubectl, namespace, tmp_path, "first"):
        apply(kubectl, namespace, whenDeleted="Clear")
        marked(kubectl, namespace)
        kubectl("delete", "namespace", namespace, "--timeout=120s", seconds=130)


def test_after_the_release_a_namespace_goes_without_an_operator(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    with operator(kubectl, namespace, tmp_path, "first") as running:
        until("the first leads", lambda: leader(kubectl, namespace) == "first", 30)
        apply(kubectl, namespace, whenDeleted="Clear")
        marked(kubectl, namespace)
        running.kill()
    kubectl("delete", "namespace", namespace, "--wait=false")
    release(kubectl, namespace)
    kubectl("wait", f"namespace/{namespace}", "--for=delete", "--timeout=60s", seconds=70)
