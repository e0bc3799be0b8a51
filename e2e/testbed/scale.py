"""The scale subresource of a CacheCluster, as programs write it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from testbed.bed import BedError
from testbed.kube import Kubectl
from testbed.waiting import until


@dataclass(frozen=True)
class Scale:
    """The scale subresource of a CacheCluster, read and replaced whole as KEDA does."""

    kubectl: Kubectl
    namespace: str
    name: str

    def read(self) -> dict[str, Any]:
        """The autoscaling/v1 Scale."""
        found: dict[str, Any] = json.loads(self.kubectl("get", f"--raw={self._path}"))
        return found

    def write(self, replicas: int) -> None:
        """Read, change, replace, and again while others write in between."""
        until("the write of the scale", lambda: self._written(replicas), 60)

    def _written(self, replicas: int) -> bool:
        scale = self.read() | {"spec": {"replicas": replicas}}
        try:
            self.kubectl("replace", f"--raw={self._path}", "--filename=-", stdin=json.dumps(scale))
        except BedError as error:
            if "(Conflict)" in str(error):
                return False
            raise
        return True

    @property
    def _path(self) -> str:
        return f"/apis/kvist.dev/v1alpha1/namespaces/{self.namespace}/cacheclusters/{self.name}/scale"
