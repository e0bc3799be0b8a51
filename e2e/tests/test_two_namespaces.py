"""Two clusters of one name in two namespaces, by one operator: neither knows of the other."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from testbed.kube import Kubectl
from testbed.release import Helm, refusals, released
from testbed.scenario import cache_cluster
from testbed.tenancy import machine_tenant, served

pytestmark = [
    pytest.mark.e2e_pod,
    pytest.mark.full,
    pytest.mark.usefixtures("node", "crd"),
    pytest.mark.timeout(1800),
]


def test_two_clusters_share_nothing_but_the_operator(kubectl: Kubectl, tmp_path: Path) -> None:
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(machine_tenant(kubectl)) for _ in range(2))
        stack.enter_context(released(Helm(kubectl), ours, watchNamespaces=[ours, theirs]))
        first, second = (
            stack.enter_context(served(kubectl, namespace, cache_cluster("demo"), tmp_path))
            for namespace in (ours, theirs)
        )
        first.settled()
        second.settled()
        assert first.client().complete().predicted == 0
        assert first.client().complete().predicted >= 512
        # The same prompt is cold there: routers mirror the engines of their own cluster only.
        assert second.client().complete().predicted == 0
        kubectl("delete", "cc/demo", f"--namespace={ours}", "--timeout=60s", seconds=70)
        first.pods.gone(lambda: first.parts("engine") + first.parts("router"))
        assert second.client().complete().predicted >= 512
        assert second.story.now("Ready")["status"] == "True"
        assert refusals(kubectl, ours) == []
