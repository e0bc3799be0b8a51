"""A CacheCluster is deleted in every state that it can be in: it goes, and its pods with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kube import Kubectl
from testbed.load import Load, prompts
from testbed.release import Helm, refusals, released
from testbed.scenario import cache_cluster
from testbed.tenancy import Served, machine_tenant, served
from testbed.waiting import until

pytestmark = [
    pytest.mark.e2e_pod,
    pytest.mark.full,
    pytest.mark.usefixtures("node", "crd"),
    pytest.mark.timeout(1800),
]
# Longer than the drain may take, so that the answers run while the cluster goes.
LONG = 512
# Clients hear nothing more once the Service is gone.
PATIENCE = 20.0


@pytest.fixture(scope="module")
def place(kubectl: Kubectl, crd: str) -> Iterator[str]:
    """A namespace with an operator, for all tests of this file."""
    with machine_tenant(kubectl) as namespace, released(Helm(kubectl), namespace):
        yield namespace


def deleted(cluster: Served) -> None:
    """Delete it; nothing of it is left in the end."""
    kubectl, where = cluster.kubectl, f"--namespace={cluster.namespace}"
    kubectl("delete", f"cc/{cluster.name}", where, "--timeout=60s", seconds=70)
    selector = f"--selector=app.kubernetes.io/instance={cluster.name}"
    kinds = "pod,statefulset,deployment,service,configmap,secret,serviceaccount,networkpolicy"
    until("nothing is left", lambda: not kubectl.listed(kinds, where, selector), 180)
    assert refusals(kubectl, cluster.namespace) == []


def test_while_an_image_is_missing(kubectl: Kubectl, place: str, tmp_path: Path) -> None:
    manifest = cache_cluster("pending")
    manifest["spec"]["engine"]["image"] = "kvist.dev/absent:e2e"
    with served(kubectl, place, manifest, tmp_path) as cluster:
        degraded = cluster.story.wait("Degraded", "True")
        assert degraded["reason"] == "EngineBroken"
        assert "image" in degraded["message"]
        deleted(cluster)


def test_while_engines_load(kubectl: Kubectl, place: str, tmp_path: Path) -> None:
    with served(kubectl, place, cache_cluster("loading"), tmp_path) as cluster:
        cluster.story.wait("Progressing", "True")
        until("an engine's container", lambda: running(cluster), 120)
        deleted(cluster)


def running(cluster: Served) -> bool:
    """Whether its engine was started."""
    statuses = [
        entry for pod in cluster.parts("engine") for entry in pod["status"].get("containerStatuses", [])
    ]
    return any(entry["name"] == "engine" and "running" in entry["state"] for entry in statuses)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("draining", {"replicas": 0}, "Draining"),
        ("rolling", {"env": [{"name": "KVIST_E2E_ROUND", "value": "1"}]}, "Rolling"),
    ],
)
def test_while_an_engine_leaves(
    kubectl: Kubectl, place: str, tmp_path: Path, name: str, change: dict[str, object], reason: str
) -> None:
    with served(kubectl, place, cache_cluster(name), tmp_path) as cluster:
        cluster.settled()
        with Load(cluster.client(), prompts(("oak",)), clients=2, tokens=LONG, patience=PATIENCE) as load:
            until("requests run", lambda: load.running() == 2, 60)
            mark = cluster.story.mark()
            cluster.patch({"spec": {"engine": change}})
            said = cluster.story.said
            until(reason, lambda: ("True", reason) in said("Progressing", mark), 120, cluster.story.told)
            deleted(cluster)
