"""What a person has to do about a cluster, found in its snapshot: the sources of `Degraded`. Pure.

The order is that of importance: the first is the condition's reason, the others are counted.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.control import reasons
from kvist_operator.control.pods import Pod
from kvist_operator.control.resources import Object
from kvist_operator.control.snapshot import Snapshot
from kvist_operator.control.views import ReplicaView, RouterView
from kvist_operator.render.kube.meta import ENGINE, REDIS, ROUTER, name_of

# Routers take a new engine up within seconds of its first answer.
GATE_SECONDS: Final = 60.0
_BROKEN: Final = {
    ENGINE: reasons.ENGINE_BROKEN,
    ROUTER: reasons.ROUTER_BROKEN,
    REDIS: reasons.REDIS_BROKEN,
}


@dataclass(frozen=True)
class Problem:
    """One of them."""

    reason: str
    message: str


def found_problems(snapshot: Snapshot, lost: str) -> Iterator[Problem]:
    """All, the gravest first. `lost`: what is said of the shared tiers, empty when they are well."""
    for missing in snapshot.missing_secrets:
        yield Problem(reasons.SECRET_MISSING, missing)
    yield from _uncreated(snapshot)
    for component, reason in _BROKEN.items():
        for pod in snapshot.of(component):
            if pod.broken:
                yield Problem(reason, f"{pod.name}: {pod.broken}")
    yield from _late(snapshot)
    yield from _shut(snapshot)
    yield from _routing_nothing(snapshot)
    if lost:
        yield Problem(reasons.BACKEND_LOST, lost)
    else:
        yield from _cut_off(snapshot)
    for scaler in snapshot.autoscalers:
        yield from _scaler_problems(scaler)


def shut_gates(snapshot: Snapshot) -> tuple[Pod, ...]:
    """Engines that serve and wait for a router to mirror them."""
    engines = (pod for pod in snapshot.of(ENGINE) if pod.serving and not pod.terminating)
    return tuple(pod for pod in engines if pod.gate is False)


def why_shut(snapshot: Snapshot, engine: Pod) -> Problem:
    """What routers say, or do not say, of an engine whose gate is shut."""
    routers = [pod for pod in snapshot.of(ROUTER) if not pod.terminating]
    if not routers:
        return Problem(reasons.ROUTER_NOT_READY, f"{engine.name} serves; no router is there to take it up")
    views = {pod.name: snapshot.views.get(pod.name, RouterView("it was not asked")) for pod in routers}
    for name, view in views.items():
        if view.silent:
            return Problem(reasons.ROUTER_SILENT, f"{engine.name} serves; {name}: {view.silent}")
    name, view = next(iter(views.items()))
    seen = view.replicas.get(engine.name)
    return Problem(reasons.NOT_MIRRORED, f"{engine.name} serves; {name} {_unmirrored(seen)}")


def waited(pod: Pod, now: datetime.datetime) -> float:
    """Seconds since it began, or ceased, to serve."""
    return (now - pod.since).total_seconds() if pod.since is not None else 0.0


def _unmirrored(seen: ReplicaView | None) -> str:
    if seen is None:
        return "has not discovered it"
    if not seen.healthy:
        return f"gets no answer from it{_because(seen)}"
    return f"does not mirror it{_because(seen)}"


def _because(seen: ReplicaView) -> str:
    return f": {seen.problem}" if seen.problem else ""


def _uncreated(snapshot: Snapshot) -> Iterator[Problem]:
    for name, message in sorted(snapshot.failures.items()):
        yield Problem(reasons.PODS_REFUSED, f"StatefulSet {name} gets no pod: {message}")
    for item in _conditions(snapshot.deployment):
        if item["type"] == "ReplicaFailure" and item["status"] == "True":
            name = name_of(snapshot.cluster, ROUTER)
            yield Problem(reasons.PODS_REFUSED, f"Deployment {name} gets no pod: {item.get('message', '')}")


def _late(snapshot: Snapshot) -> Iterator[Problem]:
    """Engines that hang while they load: kubelet ends them too, and says so only after many times."""
    limit = snapshot.cluster.spec.engine.startup_deadline
    for pod in snapshot.of(ENGINE):
        if pod.serving or pod.broken or pod.terminating or waited(pod, snapshot.now) <= limit:
            continue
        message = f"{pod.name} does not serve after engine.startupDeadline ({limit:.0f} s): see its log"
        yield Problem(reasons.ENGINE_BROKEN, message)


def _shut(snapshot: Snapshot) -> Iterator[Problem]:
    for pod in shut_gates(snapshot):
        if waited(pod, snapshot.now) > GATE_SECONDS:
            yield why_shut(snapshot, pod)


def _routing_nothing(snapshot: Snapshot) -> Iterator[Problem]:
    """Routers that get requests from the Service and have no engine for them, while others do."""
    model = snapshot.cluster.served_name
    idle = idle_routers(snapshot, model)
    if idle and any(view.routes(model) for view in snapshot.views.values()):
        yield Problem(reasons.NO_ROUTE, f"{idle[0]} sends requests for {model} to no engine")


def idle_routers(snapshot: Snapshot, model: str) -> list[str]:
    """Ready routers that answer, and route requests for the model nowhere."""
    ready = (pod for pod in snapshot.of(ROUTER) if pod.ready and not pod.terminating)
    seen = ((pod.name, snapshot.views.get(pod.name)) for pod in ready)
    return [name for name, view in seen if view is not None and not view.silent and not view.routes(model)]


def _cut_off(snapshot: Snapshot) -> Iterator[Problem]:
    """Single engines that do not reach a shared tier which others reach."""
    for name, tiers in sorted(snapshot.tiers.items()):
        for tier, problem in sorted(tiers.items()):
            if problem:
                yield Problem(reasons.BACKEND_LOST, f"{name} does not reach {tier}, others do: {problem}")


def _scaler_problems(scaler: Object) -> Iterator[Problem]:
    for item in _conditions(scaler):
        if item["type"] in ("AbleToScale", "ScalingActive") and item["status"] == "False":
            name, why = scaler["metadata"]["name"], item.get("message") or item.get("reason")
            yield Problem(reasons.AUTOSCALER_FAILING, f"HorizontalPodAutoscaler {name}: {why}")


def _conditions(obj: Object | None) -> Iterable[dict[str, Any]]:
    return ((obj or {}).get("status") or {}).get("conditions") or ()
