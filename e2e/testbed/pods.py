"""Pods of a cluster: what they are, and ending them hard."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from testbed.bed import BedError
from testbed.images import ImageStore
from testbed.kube import Kubectl
from testbed.waiting import LONG_PAUSE, until


@dataclass(frozen=True)
class Pods:
    """Of one namespace."""

    kubectl: Kubectl
    namespace: str

    def get(self, name: str) -> dict[str, Any] | None:
        """One, or None."""
        found: dict[str, Any] | None = self.kubectl.get(f"pod/{name}", f"--namespace={self.namespace}")
        return found

    def named(self, *labels: str) -> list[dict[str, Any]]:
        """Those with the labels (`key=value`)."""
        selector = f"--selector={','.join(labels)}"
        found = self.kubectl.get("pods", f"--namespace={self.namespace}", selector)
        items: list[dict[str, Any]] = found["items"] if found else []
        return items

    def component(self, cluster: str, component: str) -> list[dict[str, Any]]:
        """Of a cluster."""
        return self.named(f"app.kubernetes.io/instance={cluster}", f"app.kubernetes.io/component={component}")

    def kill(self, pod: str, container: str) -> None:
        """SIGKILL to a container's first process; returns when kubelet has seen that it ended."""
        before = self._container(pod, container)
        self._kill(before)

        def ended() -> bool:
            now = self._container(pod, container)
            return bool(now["restartCount"] > before["restartCount"] or "running" not in now["state"])

        until(f"the end of {pod}/{container}", ended, 120)

    def destroy(self, pod: str, container: str) -> None:
        """SIGKILL to a container, and the pod is deleted before kubelet can start it again.

        Deletion alone, forced too, lets programs end in order.
        """
        self._kill(self._container(pod, container))
        self.kubectl("delete", f"pod/{pod}", f"--namespace={self.namespace}", "--grace-period=0", "--force")

    @contextmanager
    def stopped(self, pod: str, container: str) -> Iterator[None]:
        """A container's first process takes no step inside the context: it is there, and answers nobody."""
        before = self._container(pod, container)
        self._kill(before, "SIGSTOP")
        try:
            yield
        finally:
            self._kill(before, "SIGCONT")

    def ready(self, name: str, uid_not: str = "", seconds: float = 600) -> dict[str, Any]:
        """Wait until a pod of this name, of another uid when one is given, is ready."""

        def there() -> bool:
            pod = self.get(name)
            return pod is not None and pod["metadata"]["uid"] != uid_not and is_ready(pod)

        until(
            f"pod {name} ready", there, seconds, lambda: str((self.get(name) or {}).get("status")), LONG_PAUSE
        )
        return self.get(name) or {}

    def gone(self, found: Callable[[], list[dict[str, Any]]], seconds: float = 180) -> None:
        """Wait until `found` finds none."""
        until("no pods", lambda: not found(), seconds, lambda: str([p["metadata"]["name"] for p in found()]))

    def _kill(self, container: dict[str, Any], signal: str = "SIGKILL") -> None:
        store = ImageStore(self.kubectl.bed, self.kubectl.catalogue)
        identity = container["containerID"].rpartition("//")[2]
        store.ctr("tasks", "kill", f"--signal={signal}", identity)

    def _container(self, pod: str, container: str) -> dict[str, Any]:
        status = (self.get(pod) or {}).get("status", {})
        listed = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
        for entry in listed:
            if entry["name"] == container:
                return dict(entry)
        raise BedError(f"pod {pod} has no container {container}")


def condition(pod: dict[str, Any], kind: str) -> dict[str, Any]:
    """One condition of a pod."""
    listed = pod.get("status", {}).get("conditions", [])
    return next((dict(item) for item in listed if item["type"] == kind), {})


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether it is ready and stays."""
    return condition(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]


def restarts(pod: dict[str, Any]) -> dict[str, int]:
    """Of its containers."""
    status = pod["status"]
    listed = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
    return {entry["name"]: entry["restartCount"] for entry in listed}


def moment(text: str) -> datetime.datetime:
    """A Kubernetes timestamp."""
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
