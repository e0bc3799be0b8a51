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
# Longer than volumes and network take; longer than an image of a model server takes to be pulled.
MOUNT_SECONDS: Final = 180.0
CREATE_SECONDS: Final = 900.0

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
    "Unbound": "create the PersistentVolumeClaim in this namespace, or correct its name "
    "(model.volume.claimName, podTemplate); kubectl describe pvc says why one is not bound",
    "OOMKilled": "raise its memory limit",
    "Failed": "read its log and kubectl describe pod",
    "NotStarted": "kubectl describe pod names the volume or the network that it waits for",
    "NotCreated": "kubectl describe pod tells whether its image is still being pulled",
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
    since: datetime.datetime | None = None  # when `serving` became what it is, or the pod was made
    gate: bool | None = None  # readiness gate of the operator: open, shut, or none asked for
    address: str = ""
    component: str = ""
    ports: Mapping[str, int] | None = None
    tls: frozenset[str] = frozenset()  # names of ports that are probed over TLS

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
        broken="" if deleted is not None else _broken(status, conditions, now),
        since=_since(conditions.get("ContainersReady", {}), meta),
        gate=_true(conditions, READINESS_GATE) if READINESS_GATE in gates else None,
        address=status.get("podIP") or "",
        component=component,
        ports={p["name"]: p["containerPort"] for p in _ports(spec) if "name" in p},
        tls=frozenset(_tls_ports(spec)),
    )


def _tls_ports(spec: Object) -> Iterator[str]:
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        probe = (container.get("startupProbe") or {}).get("httpGet") or {}
        if probe.get("scheme") == "HTTPS":
            yield str(probe.get("port"))


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


def _since(condition: Mapping[str, Any], meta: Mapping[str, Any]) -> datetime.datetime | None:
    text = condition.get("lastTransitionTime") or meta.get("creationTimestamp")
    return parse_time(text) if text else None


def _broken(status: Mapping[str, Any], conditions: Mapping[str, Any], now: datetime.datetime) -> str:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("reason") == "Unschedulable":
        message = str(scheduled.get("message") or "")
        # A bigger node mends no claim. The scheduler has both spellings, and no reason of its own for it.
        remedy = "Unbound" if "persistentvolumeclaim" in message.lower() else "Unschedulable"
        return _told("Unschedulable", "no node takes it", message, remedy)
    if status.get("phase") == "Failed":
        return _told(status.get("reason") or "Failed", "it ended", status.get("message"))
    listed = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    found = next((found for container in listed if (found := _container(container))), "")
    return found or _unstarted(conditions, listed, now)


def _unstarted(
    conditions: Mapping[str, Any], containers: tuple[Mapping[str, Any], ...], now: datetime.datetime
) -> str:
    """Why a pod that has its node does not start; kubelet says no more than that it waits."""
    began = conditions.get("PodScheduled", {}).get("lastTransitionTime")
    waited = (now - parse_time(began)).total_seconds() if began else 0.0
    sandbox = conditions.get("PodReadyToStartContainers", {})
    if sandbox.get("status") == "False" and waited > MOUNT_SECONDS:
        return _told(
            "NotStarted", f"its volumes or its network are not there after {MOUNT_SECONDS:.0f} s", None
        )
    creating = [container["name"] for container in containers if _waits_for(container) == "ContainerCreating"]
    if creating and waited > CREATE_SECONDS:
        what = f"container {creating[0]} is not created after {CREATE_SECONDS / 60:.0f} minutes"
        return _told("NotCreated", what, None)
    return ""


def _waits_for(container: Mapping[str, Any]) -> str:
    return str(((container.get("state") or {}).get("waiting") or {}).get("reason") or "")


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


def _told(reason: str, what: str, more: str | None, remedy: str = "") -> str:
    detail = f" ({more[:200]})" if more else ""
    return f"{reason}: {what}{detail}; {_REMEDIES.get(remedy or reason, 'see kubectl describe pod')}"
