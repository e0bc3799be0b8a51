"""Cluster-wide and for named namespaces: what the chart grants is what its operator asks for. No pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.bed import BedError
from testbed.installed import installed_operator
from testbed.kube import Kubectl
from testbed.operator_process import OperatorProcess
from testbed.release import ACCOUNT, CHART, Helm, refusals, values
from testbed.scenario import cache_cluster
from testbed.tenancy import tenant
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_api, pytest.mark.usefixtures("crd")]


@pytest.fixture
def elsewhere(kubectl: Kubectl) -> Iterator[str]:
    with tenant(kubectl) as name:
        yield name


@contextmanager
def installed(
    kubectl: Kubectl, namespace: str, folder: Path, watched: list[str]
) -> Iterator[OperatorProcess]:
    """A release and its operator."""
    helm, where = Helm(kubectl), f"--namespace={namespace}"
    given = json.dumps(values(namespace, watchNamespaces=watched))
    helm("upgrade", "--install", ACCOUNT, str(CHART), where, "--values=-", stdin=given)
    try:
        namespaces = f"--watch-namespaces={json.dumps(watched)}"
        with installed_operator(kubectl, namespace, folder, "first", namespaces) as process:
            yield process
    finally:
        # Its hook is a pod, which does not run here.
        helm("uninstall", ACCOUNT, where, "--no-hooks")


def serve(kubectl: Kubectl, namespace: str, process: OperatorProcess) -> None:
    """A cluster with all kinds of children is made, reported, changed and deleted."""
    manifest = cache_cluster("demo", remote={"redis": {"managed": {}}})
    manifest["spec"]["router"]["autoscaling"] = {"maxReplicas": 2}
    where = f"--namespace={namespace}"
    for replicas in (1, 2):
        manifest["spec"]["engine"]["replicas"] = replicas
        kubectl("apply", where, "--filename=-", stdin=yaml.safe_dump(manifest))
        until(
            "a status",
            lambda replicas=replicas: status(kubectl, namespace).get("observedGeneration") == replicas,
            60,
            lambda: f"{status(kubectl, namespace)}\n{process.log.read_text()[-2000:]}",
        )
    kubectl("delete", "cc/demo", where, "--timeout=30s")


def status(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.get("cc/demo", f"--namespace={namespace}")
    return dict(found.get("status", {}))


def kinds(kubectl: Kubectl, namespace: str) -> set[str]:
    """Of everything that the release made."""
    text = Helm(kubectl)("get", "manifest", ACCOUNT, f"--namespace={namespace}")
    return {item["kind"] for item in yaml.safe_load_all(text) if item}


def test_cluster_wide_it_serves_every_namespace_with_the_rights_it_has(
    kubectl: Kubectl, namespace: str, elsewhere: str, tmp_path: Path
) -> None:
    with installed(kubectl, namespace, tmp_path, []) as process:
        serve(kubectl, elsewhere, process)
        assert refusals(kubectl, namespace) == []


def test_cluster_wide_users_of_a_namespace_may_make_clusters_in_it(
    kubectl: Kubectl, namespace: str, elsewhere: str, tmp_path: Path
) -> None:
    def may(user: str, verb: str, where: str) -> bool:
        asked = ("auth", "can-i", verb, "cacheclusters.kvist.dev", f"--as={user}", f"--namespace={where}")
        try:
            return kubectl(*asked).strip() == "yes"
        except BedError:
            return False

    with installed(kubectl, namespace, tmp_path, []):
        for role, user in (("edit", "editor"), ("view", "viewer")):
            kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--user={user}",
                    f"--namespace={elsewhere}")  # fmt: skip
        # Kubernetes' own roles take the rights over in a moment.
        until("an editor's rights", lambda: may("editor", "create", elsewhere), 30)
        until("a viewer's rights", lambda: may("viewer", "get", elsewhere), 30)
        assert not may("viewer", "create", elsewhere)
        assert not may("editor", "create", namespace)


def test_for_named_namespaces_roles_are_all_it_has_and_needs(
    kubectl: Kubectl, namespace: str, elsewhere: str, tmp_path: Path
) -> None:
    with installed(kubectl, namespace, tmp_path, [namespace]) as process:
        assert not {kind for kind in kinds(kubectl, namespace) if kind.startswith("Cluster")}
        serve(kubectl, namespace, process)
        assert refusals(kubectl, namespace) == []
        manifest = yaml.safe_dump(cache_cluster("demo"))
        kubectl("apply", f"--namespace={elsewhere}", "--filename=-", stdin=manifest)
        serve(kubectl, namespace, process)
        assert status(kubectl, elsewhere) == {}
        kubectl("delete", "cc/demo", f"--namespace={elsewhere}", "--timeout=30s")
