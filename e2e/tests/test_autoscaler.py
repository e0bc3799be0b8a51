"""A real HorizontalPodAutoscaler changes the number of engines through the CacheCluster, and nothing else.

Without metrics its controller acts by its bounds. Engines cannot start here: shown is who writes what.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.autoscaler import autoscaler
from testbed.kube import Kubectl
from testbed.operator_process import operator
from testbed.scenario import cache_cluster
from testbed.waiting import until

pytestmark = [pytest.mark.e2e_api, pytest.mark.usefixtures("crd"), pytest.mark.timeout(600)]


@pytest.fixture
def cluster(kubectl: Kubectl, namespace: str, tmp_path: Path) -> Iterator[str]:
    """The namespace of a cluster of two engines, and of its operator."""
    with operator(kubectl, namespace, tmp_path, "first"):
        manifest = yaml.safe_dump(cache_cluster("demo", replicas=2))
        kubectl("apply", f"--namespace={namespace}", "--filename=-", stdin=manifest)
        follows(kubectl, namespace, 2)
        yield namespace


def follows(kubectl: Kubectl, namespace: str, engines: int) -> None:
    """Wait until as many are asked for, made, and reported."""
    where = f"--namespace={namespace}"

    def numbers() -> list[Any]:
        custom = kubectl.get("cc/demo", where) or {}
        made = kubectl.get("statefulset/demo-engine", where) or {}
        return [
            custom.get("spec", {}).get("engine", {}).get("replicas"),
            custom.get("status", {}).get("replicas"),
            made.get("spec", {}).get("replicas"),
        ]

    until(f"{engines} engines", lambda: numbers() == [engines] * 3, 180, lambda: str(numbers()), pause=1)


def test_it_moves_engines_into_its_bounds_one_at_a_time_downwards(kubectl: Kubectl, cluster: str) -> None:
    with autoscaler(kubectl, cluster, "demo") as scaler:
        scaler.bounds(4, 5)
        follows(kubectl, cluster, 4)
        scaler.bounds(1, 2)
        follows(kubectl, cluster, 2)
    selector = "--field-selector=involvedObject.kind=CacheCluster,reason=Scaled"
    events = kubectl.listed("events", f"--namespace={cluster}", selector)
    assert {event["message"] for event in events} == {"2 to 4 engines", "4 to 3 engines", "3 to 2 engines"}
