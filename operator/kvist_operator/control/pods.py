"""Pod objects -> what decisions need to know of them. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.control.resources import Object
from kvist_operator.render.kube.meta import READINESS_GATE

REVISION_LABEL: Final = "controller-revision-hash"
# A deleted pod that is still there this long after its grace period has lost its node: nothing waits for it.
STUCK_SECONDS: Final = 60.0
RESTARTS: Final = 3

_CRASHING: Final = "CrashLoopBackOff"
_PULLING: Final = frozenset({"ImagePullBackOff", "ErrImagePull"})
_REMEDIES: Final = {
    "CrashLoopBackOff": "read its log: kubectl logs --previous",
    "ImagePullBackOff": "check the image's name and imagePullSecrets",
    "ErrImageNeverPull": "load the image on the node, or let it be pulled",
    "InvalidImageName": "correct the image's name",
    "CreateContainerConfigError": "create the Secret or ConfigMap that it names",
    "CreateContainerError": "check command and mounts in podTemplate",
    "RunContainerError": "check command and mounts in podTemplate",
    "Unschedulable": "add a node that fits, or ask for less in resources",
    "OOMKilled": "raise its memory limit",
    "Failed": "read its log and kubectl describe pod",
}


@dataclass(frozen=True)
class Pod:
    """One pod of a cluster. `broken` says why it will not become ready by waiting; empty otherwise."""

    name: str
    uid: str
    ordinal: int = -1
    revision: str = ""
    ready: bool = False  # condition Ready: containers and readiness gates
    serving: bool = False  # condition ContainersReady
    terminating: bool = False
    stuck: bool = False  # terminating for longer than anything can take
    broken: str = ""
    gate: bool | None = None  # readiness gate of the operator: open, shut, or none asked for
    address: str = ""
    component: str = ""
    ports: Mapping[str, int] | None = None

    def port(self, name: str, otherwise: int) -> int:
        """A container port by name."""
        return (self.ports or {}).get(name, otherwise)


def pod_of(obj: Object, component: str, now: datetime.datetime) -> Pod:
    """The view of one pod object."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    deleted = meta.get("deletionTimestamp")
    gates = [gate["conditionType"] for gate in spec.get("readinessGates") or ()]
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        ordinal=_ordinal(meta["name"]),
        revision=(meta.get("labels") or {}).get(REVISION_LABEL, ""),
        ready=_true(conditions, "Ready"),
        serving=_true(conditions, "ContainersReady"),
        terminating=deleted is not None,
        stuck=deleted is not None and (now - parse_time(deleted)).total_seconds() > STUCK_SECONDS,
        broken="" if deleted is not None else _broken(status, conditions),
        gate=_true(conditions, READINESS_GATE) if READINESS_GATE in gates else None,
        address=status.get("podIP") or "",
        component=component,
        ports={p["name"]: p["containerPort"] for p in _ports(spec) if "name" in p},
    )


def parse_time(text: str) -> datetime.datetime:
    """A Kubernetes timestamp."""
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))


def _ordinal(name: str) -> int:
    last = name.rsplit("-", 1)[-1]
    return int(last) if last.isdecimal() and last.isascii() else -1


def _true(conditions: Mapping[str, Any], kind: str) -> bool:
    return bool(conditions.get(kind, {}).get("status") == "True")


def _ports(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        yield from container.get("ports") or ()


def _broken(status: Mapping[str, Any], conditions: Mapping[str, Any]) -> str:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("reason") == "Unschedulable":
        return _told("Unschedulable", "no node takes it", scheduled.get("message"))
    if status.get("phase") == "Failed":
        return _told(status.get("reason") or "Failed", "it ended", status.get("message"))
    listed = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return next((found for container in listed if (found := _container(container))), "")


def _container(container: Mapping[str, Any]) -> str:
    """The same words as long as it is the same trouble: kubelet's own change every few seconds."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    last = (container.get("lastState") or {}).get("terminated") or {}
    reason, name = waiting.get("reason"), f"container {container['name']}"
    if container.get("ready"):
        return ""
    if last.get("reason") == "OOMKilled":
        return _told("OOMKilled", f"{name} used more memory than its limit", None)
    if reason == _CRASHING or (last and int(container.get("restartCount") or 0) >= RESTARTS):
        return _told(_CRASHING, f"{name} keeps ending", f"last exit code {last.get('exitCode', 'unknown')}")
    if reason in _PULLING:
        return _told("ImagePullBackOff", name, container.get("image"))
    return _told(str(reason), name, waiting.get("message")) if reason in _REMEDIES else ""


def _told(reason: str, what: str, more: str | None) -> str:
    detail = f" ({more[:200]})" if more else ""
    return f"{reason}: {what}{detail}; {_REMEDIES.get(reason, 'see kubectl describe pod')}"
