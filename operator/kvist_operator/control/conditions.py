"""Snapshot -> the conditions of a CacheCluster. Pure.

Each is about the current generation only. `Ready` is true when a request through the router would be
answered by it: some router pod of the current revision is ready and routes to a healthy engine, and no
engine of an older revision serves any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvist_operator.control import reasons
from kvist_operator.control.pods import Pod
from kvist_operator.control.problems import Problem, found_problems, idle_routers, shut_gates, why_shut
from kvist_operator.control.resources import STATEFUL_SETS, Object
from kvist_operator.control.rollout import Action, Decision
from kvist_operator.control.snapshot import Snapshot, observed
from kvist_operator.control.views import RouterView
from kvist_operator.render.kube.meta import ENGINE, REDIS, ROUTER, name_of

MAX_MESSAGE: Final = 1024
_AT_ZERO: Final = "engine.replicas is 0: raise it to serve"


class Type(StrEnum):
    """Types of conditions, in the order of the status."""

    READY = "Ready"
    ENGINES = "EnginesReady"
    BACKEND = "BackendReady"
    ROUTER = "RouterReady"
    CACHE_AWARE = "CacheAware"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"


@dataclass(frozen=True)
class Condition:
    """One condition; `status` None is Unknown."""

    type: Type
    status: bool | None
    reason: str
    message: str = ""

    @property
    def advice(self) -> str:
        """The message, with what to do about it."""
        return reasons.told(self.reason, self.message)

    def as_object(self, generation: int, before: Mapping[str, Any] | None, now: str) -> Object:
        """For the status; the time stays while the status does."""
        text = "Unknown" if self.status is None else str(self.status)
        kept = before is not None and before.get("status") == text
        return {
            "type": str(self.type),
            "status": text,
            "reason": self.reason,
            "message": self.advice[:MAX_MESSAGE],
            "observedGeneration": generation,
            "lastTransitionTime": before["lastTransitionTime"] if kept and before is not None else now,
        }


def evaluate(snapshot: Snapshot, decision: Decision, problems: Iterable[Problem] = ()) -> list[Condition]:
    """All conditions, in the order of `Type`."""
    engines, backend = _engines(snapshot), _backend(snapshot)
    router, aware = _router(snapshot), _cache_aware(snapshot)
    degraded = _degraded([*problems, *_problems(snapshot, decision, backend)])
    ready = _ready(snapshot, router)
    return [ready, engines, backend, router, aware, _progressing(decision, snapshot), degraded]


def blocked(problem: Problem) -> list[Condition]:
    """Of a spec that cannot be carried out; the conditions of what runs stay as they were."""
    return [
        Condition(Type.READY, False, problem.reason, problem.message),
        Condition(Type.PROGRESSING, False, problem.reason, problem.message),
        Condition(Type.DEGRADED, True, problem.reason, problem.message),
    ]


def _engines(snapshot: Snapshot) -> Condition:
    engines = snapshot.engines
    if engines.desired == 0:
        return Condition(Type.ENGINES, False, reasons.SCALED_TO_ZERO, _AT_ZERO)
    current = [pod for pod in engines.pods if _current(pod, engines.revision)]
    ready = sum(pod.ready for pod in current)
    old = [pod.name for pod in engines.pods if pod not in current and not pod.terminating]
    counts = f"{ready} of {engines.desired} engines are ready"
    if ready >= engines.desired and not old and engines.observed:
        return Condition(Type.ENGINES, True, reasons.ALL_READY, counts)
    if old:
        return Condition(
            Type.ENGINES, False, reasons.OLD_REVISION, f"{counts}; to be replaced: {_names(old)}"
        )
    shut = shut_gates(snapshot)
    if shut:
        return Condition(Type.ENGINES, False, *_of(why_shut(snapshot, shut[0]), f"{counts}; "))
    waiting = [pod.name for pod in current if not pod.ready]
    reason = reasons.SOME_NOT_READY if ready else reasons.NONE_READY
    return Condition(Type.ENGINES, False, reason, counts + _look(waiting))


def _backend(snapshot: Snapshot) -> Condition:
    remote = snapshot.cluster.spec.cache.remote
    if remote.redis is None and remote.object_store is None:
        return Condition(Type.BACKEND, True, reasons.NOT_CONFIGURED, "no shared tier is configured")
    missing = _missing_redis(snapshot)
    if missing and _never_was(snapshot, Type.BACKEND):
        return Condition(Type.BACKEND, False, reasons.STARTING, missing)
    lost = _lost_tier(snapshot) or missing
    if lost:
        return Condition(Type.BACKEND, False, reasons.BACKEND_LOST, lost)
    if not snapshot.tiers:
        return Condition(Type.BACKEND, None, reasons.NOT_ASKED, "no agent could be asked")
    return Condition(Type.BACKEND, True, reasons.REACHABLE, "the shared tier answers")


def _missing_redis(snapshot: Snapshot) -> str:
    """How many pods the managed Redis lacks; empty when it is whole, or somebody else's."""
    redis = snapshot.cluster.spec.cache.remote.redis
    if redis is None or redis.managed is None:
        return ""
    found = snapshot.child((STATEFUL_SETS, name_of(snapshot.cluster, REDIS)))
    ready = (found.get("status") or {}).get("readyReplicas", 0) if found is not None else 0
    wanted = redis.managed.replicas
    return f"{ready} of {wanted} Redis pods are ready" if ready < wanted else ""


def _never_was(snapshot: Snapshot, kind: Type) -> bool:
    """Whether the condition waits for a first time, as after the making of a cluster."""
    listed = (snapshot.raw.get("status") or {}).get("conditions") or ()
    before = next((item["reason"] for item in listed if item["type"] == str(kind)), "")
    return before in ("", reasons.STARTING, reasons.NOT_CONFIGURED)


def _lost_tier(snapshot: Snapshot) -> str:
    """A tier of which every agent that answers says that it fails, several times in a row."""
    for tier in sorted({tier for found in snapshot.tiers.values() for tier in found}):
        said = [found[tier] for found in snapshot.tiers.values() if tier in found]
        if all(said):
            return f"{tier}: {said[0]}"
    return ""


def _router(snapshot: Snapshot) -> Condition:
    found = snapshot.deployment
    status = (found.get("status") or {}) if found is not None else {}
    wanted = int(found["spec"].get("replicas", 1)) if found is not None else 1
    ready, updated = int(status.get("readyReplicas", 0)), int(status.get("updatedReplicas", 0))
    counts = f"{ready} of {wanted} routers are ready"
    if found is None or not observed(found) or ready == 0:
        waiting = [pod.name for pod in snapshot.of(ROUTER) if not pod.ready]
        message = counts + _look(waiting)
        return Condition(Type.ROUTER, False, reasons.ROUTER_NOT_READY, message)
    old = int(status.get("replicas", 0)) - updated
    if old > 0:
        return Condition(Type.ROUTER, False, reasons.OLD_REVISION, f"{counts}, {old} of an older revision")
    return Condition(Type.ROUTER, True, reasons.ALL_READY, counts)


def _cache_aware(snapshot: Snapshot) -> Condition:
    if not snapshot.cluster.spec.cache.enabled:
        return Condition(Type.CACHE_AWARE, False, reasons.CACHE_DISABLED, "cache.enabled is false")
    routers = [pod for pod in snapshot.of(ROUTER) if pod.ready and not pod.terminating]
    if not routers:
        return Condition(Type.CACHE_AWARE, None, reasons.ROUTER_NOT_READY, "no router is ready to be asked")
    engines = [pod for pod in snapshot.of(ENGINE) if pod.serving and not pod.terminating]
    for pod in routers:
        view = snapshot.views.get(pod.name, RouterView("it was not asked"))
        if view.silent:
            return Condition(Type.CACHE_AWARE, None, reasons.ROUTER_SILENT, f"{pod.name}: {view.silent}")
        unknown = [engine.name for engine in engines if not view.mirrors(engine.name)]
        if unknown:
            message = f"{pod.name} does not mirror {_names(unknown)}"
            return Condition(Type.CACHE_AWARE, False, reasons.NOT_MIRRORED, message)
        if view.tokens_problem:
            message = f"{pod.name}: {view.tokens_problem}"
            return Condition(Type.CACHE_AWARE, False, reasons.TOKENS_DIFFER, message)
        doubted = [engine.name for engine in engines if view.replicas[engine.name].doubted]
        if doubted:
            message = f"{pod.name}: {_names(doubted)} reuse less than their agents claim to hold"
            return Condition(Type.CACHE_AWARE, False, reasons.VIEW_DOUBTED, message)
    if not engines:
        return Condition(Type.CACHE_AWARE, False, reasons.NONE_READY, "no engine is there to be mirrored")
    return Condition(Type.CACHE_AWARE, True, reasons.MIRRORING)


def _ready(snapshot: Snapshot, router: Condition) -> Condition:
    engines = snapshot.engines
    if engines.desired == 0:
        return Condition(Type.READY, False, reasons.SCALED_TO_ZERO, _AT_ZERO)
    serving = [pod for pod in engines.pods if pod.ready and not pod.terminating]
    old = [pod.name for pod in serving if not _current(pod, engines.revision)]
    if not engines.observed or old:
        message = f"to be replaced: {_names(old)}" if old else "engines of this generation are to come"
        return Condition(Type.READY, False, reasons.OLD_REVISION, message)
    if not serving:
        shut = shut_gates(snapshot)
        if shut:
            return Condition(Type.READY, False, *_of(why_shut(snapshot, shut[0])))
        message = "no engine is ready" + _look([pod.name for pod in engines.pods])
        return Condition(Type.READY, False, reasons.NONE_READY, message)
    if not router.status:
        return Condition(Type.READY, False, router.reason, router.message)
    return _routed(snapshot)


def _routed(snapshot: Snapshot) -> Condition:
    """The Service may choose any ready router, so each that answers has to route."""
    model = snapshot.cluster.served_name
    ready = [pod for pod in snapshot.of(ROUTER) if pod.ready and not pod.terminating]
    views = [snapshot.views.get(pod.name, RouterView("it was not asked")) for pod in ready]
    idle = idle_routers(snapshot, model)
    if idle:
        message = f"{_names(idle)} sends requests for {model} to no engine"
        return Condition(Type.READY, False, reasons.NO_ROUTE, message)
    if any(view.routes(model) for view in views):
        return Condition(Type.READY, True, reasons.SERVING)
    silent = next((view.silent for view in views if view.silent), "no router is ready to be asked")
    return Condition(Type.READY, False, reasons.ROUTER_SILENT, silent)


def _progressing(decision: Decision, snapshot: Snapshot) -> Condition:
    busy = decision.action is not Action.NONE and decision.reason != reasons.STALLED
    message = decision.message if busy or decision.reason == reasons.STALLED else ""
    return Condition(Type.PROGRESSING, busy, decision.reason, message)


def _degraded(problems: list[Problem]) -> Condition:
    if not problems:
        return Condition(Type.DEGRADED, False, reasons.AS_EXPECTED)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Condition(Type.DEGRADED, True, problems[0].reason, problems[0].message + more)


def _problems(snapshot: Snapshot, decision: Decision, backend: Condition) -> Iterator[Problem]:
    if decision.reason == reasons.STALLED:
        yield Problem(reasons.STALLED, decision.message)
    lost = backend.status is False and backend.reason == reasons.BACKEND_LOST
    yield from found_problems(snapshot, backend.message if lost else "")


def _of(problem: Problem, before: str = "") -> tuple[str, str]:
    return problem.reason, before + problem.message


def _current(pod: Pod, revision: str) -> bool:
    return pod.revision == revision and not pod.terminating


def _look(names: list[str]) -> str:
    return f"; see kubectl describe pod {_names(names)}" if names else "; its pods are being created"


def _names(names: list[str]) -> str:
    return " ".join(sorted(names)[:5]) + (" ..." if len(names) > 5 else "")
