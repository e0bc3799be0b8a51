"""The scale subresource of a CacheCluster as autoscalers use it, with the operator behind it. No pods run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.bed import BedError
from testbed.kube import Kubectl
from testbed.operator_process import OperatorProcess, operator
from testbed.scenario import cache_cluster
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_api, pytest.mark.usefixtures("crd")]


class Scale:
    """`/scale` of one cluster, and what follows it."""

    def __init__(self, kubectl: Kubectl, namespace: str, process: OperatorProcess) -> None:
        self.kubectl = kubectl
        self.where = f"--namespace={namespace}"
        self.path = f"/apis/kvist.dev/v1alpha1/namespaces/{namespace}/cacheclusters/demo/scale"
        self.process = process

    def read(self) -> Any:
        return json.loads(self.kubectl("get", "--raw", self.path))

    def write(self, body: dict[str, Any]) -> None:
        """As autoscalers do: what was read, with another number."""
        self.kubectl("replace", "--raw", self.path, "--filename=-", stdin=json.dumps(body))

    def to(self, replicas: int) -> None:
        self.write(self.read() | {"spec": {"replicas": replicas}})

    def apply(self) -> None:
        """A person's manifest, which says nothing about the number of engines."""
        manifest = cache_cluster("demo")
        del manifest["spec"]["engine"]["replicas"]
        self.kubectl("apply", "--server-side", self.where, "--filename=-", stdin=yaml.safe_dump(manifest))

    def follows(self, replicas: int) -> None:
        """Wait until as many engines exist, and the status says so."""

        def there() -> bool:
            found = self.kubectl.get("statefulset/demo-engine", self.where)
            status = self.read()["status"]
            return (found or {}).get("spec", {}).get("replicas") == replicas == status.get("replicas")

        until(
            f"{replicas} engines", there, 60, lambda: f"{self.read()}\n{self.process.log.read_text()[-2000:]}"
        )


@pytest.fixture
def scale(kubectl: Kubectl, namespace: str, tmp_path: Path) -> Iterator[Scale]:
    with operator(kubectl, namespace, tmp_path, "first") as process:
        made = Scale(kubectl, namespace, process)
        made.apply()
        made.follows(1)
        yield made


def test_engines_follow_and_a_manifest_without_a_number_leaves_it(scale: Scale) -> None:
    scale.to(3)
    scale.follows(3)
    scale.apply()
    assert scale.read()["spec"]["replicas"] == 3


def test_its_selector_finds_the_engines_and_nothing_else(scale: Scale) -> None:
    selector = f"--selector={scale.read()['status']['selector']}"

    def pods() -> list[str]:
        return [
            item["metadata"]["name"] for item in scale.kubectl.get("pods", scale.where, selector)["items"]
        ]

    until("the engine's pod", lambda: pods() == ["demo-engine-0"], 60, lambda: str(pods()))
    until("the router's pod", lambda: len(scale.kubectl.get("pods", scale.where)["items"]) == 2, 60)
    assert pods() == ["demo-engine-0"]


@pytest.mark.parametrize("replicas", [-1, 1025])
def test_a_number_that_no_cluster_may_have_is_refused(scale: Scale, replicas: int) -> None:
    with pytest.raises(BedError, match="replicas"):
        scale.to(replicas)
    assert scale.read()["spec"]["replicas"] == 1


def test_a_writer_with_an_old_view_is_refused(scale: Scale) -> None:
    old = scale.read()
    scale.to(2)
    with pytest.raises(BedError, match="modified"):
        scale.write(old | {"spec": {"replicas": 5}})
    assert scale.read()["spec"]["replicas"] == 2
