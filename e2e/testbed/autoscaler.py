"""Kubernetes' own autoscaler over a CacheCluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from testbed.kube import Kubectl

TARGET = {"apiVersion": "kvist.dev/v1alpha1", "kind": "CacheCluster"}


@dataclass(frozen=True)
class Autoscaler:
    """A HorizontalPodAutoscaler over a CacheCluster.

    No metric can be had on the test bed, so its controller acts by the bounds only.
    """

    kubectl: Kubectl
    namespace: str
    name: str

    def bounds(self, smallest: int, largest: int) -> None:
        """Create it or change it."""
        cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
        wanted = {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "scaleTargetRef": {**TARGET, "name": self.name},
                "minReplicas": smallest,
                "maxReplicas": largest,
                "metrics": [{"type": "Resource", "resource": cpu}],
            },
        }
        self.kubectl("apply", "--filename=-", stdin=json.dumps(wanted))


@contextmanager
def autoscaler(kubectl: Kubectl, namespace: str, name: str) -> Iterator[Autoscaler]:
    """One that is deleted at the end."""
    try:
        yield Autoscaler(kubectl, namespace, name)
    finally:
        kubectl("delete", f"hpa/{name}", f"--namespace={namespace}", "--ignore-not-found")
