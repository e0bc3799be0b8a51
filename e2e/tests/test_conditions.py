"""What conditions of a CacheCluster promise, with two engines, raised from none, and two routers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testbed.kube import Kubectl
from testbed.release import Helm, refusals, released
from testbed.scale import Scale
from testbed.scenario import cache_cluster
from testbed.tenancy import Served, machine_tenant, served

pytestmark = [pytest.mark.e2e_pod, pytest.mark.full, pytest.mark.timeout(1500)]
NAME = "pool"


@pytest.fixture(scope="module")
def pool(kubectl: Kubectl, crd: str, node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Nobody but a writer of the scale subresource has asked for its two engines.

    Probes of routers are patient, so that one that was stopped is still ready when it is asked.
    """
    manifest = cache_cluster(NAME, replicas=0)
    patient = {"readinessProbe": {"failureThreshold": 30}, "livenessProbe": {"failureThreshold": 30}}
    overlay = {"spec": {"containers": [{"name": "router", **patient}]}}
    manifest["spec"]["router"] |= {"replicas": 2, "podTemplate": overlay}
    folder = tmp_path_factory.mktemp("story")
    with (
        machine_tenant(kubectl) as namespace,
        released(Helm(kubectl), namespace),
        served(kubectl, namespace, manifest, folder) as cluster,
    ):
        assert cluster.story.wait("Ready", "False")["reason"] == "ScaledToZero"
        Scale(kubectl, namespace, NAME).write(2)
        cluster.settled(1200)
        yield cluster
        assert refusals(kubectl, namespace) == []


def test_ready_is_about_the_generation_that_was_applied(pool: Served) -> None:
    pool.patch({"spec": {"router": {"env": [{"name": "KVIST_E2E_ROUND", "value": "1"}]}}})
    # As a script does it.
    pool.kubectl("wait", f"cc/{NAME}", f"--namespace={pool.namespace}", "--for=condition=Ready",
                 "--timeout=900s", seconds=910)  # fmt: skip
    assert pool.client().complete().text
    assert [variable(pod, "KVIST_E2E_ROUND") for pod in staying(pool, "router")] == ["1", "1"]


def test_every_router_is_asked_whether_it_is_cache_aware(pool: Served) -> None:
    pool.settled()
    mark = pool.story.mark()
    silent = staying(pool, "router")[1]["metadata"]["name"]
    with pool.pods.stopped(silent, "router"):
        # A cluster in which nothing happens is asked every 15 seconds.
        assert pool.story.saw("CacheAware", "Unknown", mark, 120) == "RouterSilent"
        assert pool.story.now("CacheAware")["message"].startswith(f"{silent}: ")
    pool.settled()
    # The other router answered all the time.
    assert pool.story.said("Ready", mark) == []


def staying(pool: Served, component: str) -> list[dict[str, Any]]:
    """Pods that are not ending."""
    return [pod for pod in pool.parts(component) if "deletionTimestamp" not in pod["metadata"]]


def variable(pod: dict[str, Any], name: str) -> str:
    """An environment variable of the pod's only container; empty when it has none of the name."""
    (container,) = pod["spec"]["containers"]
    return next((str(entry["value"]) for entry in container["env"] if entry["name"] == name), "")
