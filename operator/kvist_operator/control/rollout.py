"""What to do next with the engine pods of a cluster: scale, drain, evict, or wait. Pure.

Called once a reconciliation; every decision starts from what is there, so an operator that was killed
half-way loses nothing. Rules, in this order:

1. More replicas are wanted: at once, a drain of one that stays is undone.
2. Broken pods of an old revision go first: they serve nothing, so no other pod has to be well for that.
3. Fewer are wanted: the highest ordinal drains, then the number falls by one. What serves nothing needs none.
4. A new revision: one pod at a time by eviction (its preStop drains), the next when all others are ready.
   A new revision that breaks stops the rollout there: pods of the old one stay.

One pod at a time leaves service by the operator's hand; a pod that is stuck on a lost node holds nothing up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvist_connector.quantity import counted
from kvist_operator.control import reasons
from kvist_operator.control.pods import Pod


class Drain(StrEnum):
    """How far the drain of a pod is, as its agent says."""

    NONE = "none"
    RUNNING = "running"
    DONE = "done"  # or its deadline passed, or nobody can be asked: it is not waited for


class Action(StrEnum):
    """The next step. WAIT: something has to happen first. NONE: everything is as wanted."""

    NONE = "none"
    WAIT = "wait"
    SCALE = "scale"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    EVICT = "evict"


@dataclass(frozen=True)
class Engines:
    """Snapshot of the engines. `replicas` is what the StatefulSet is told, None without one."""

    desired: int
    replicas: int | None
    observed: bool  # its controller has seen its latest generation
    revision: str  # the one that new pods get
    pods: tuple[Pod, ...] = ()
    drains: Mapping[str, Drain] = field(default_factory=dict)

    def drain(self, pod: Pod) -> Drain:
        """Of one pod."""
        return self.drains.get(pod.name, Drain.NONE)


@dataclass(frozen=True)
class Decision:
    """`replicas` is what the StatefulSet shall be told from now on."""

    action: Action
    replicas: int
    reason: str
    message: str = ""
    pod: Pod | None = None


def decide(engines: Engines) -> Decision:
    """The next step."""
    if engines.replicas is None:
        return Decision(Action.SCALE, engines.desired, reasons.STARTING, "engines are being created")
    grown = max(engines.desired, engines.replicas)
    kept = next((pod for pod in _present(engines) if _drained_for_nothing(pod, engines)), None)
    if kept is not None:
        return Decision(Action.UNDRAIN, grown, reasons.SCALING, f"{kept.name} stays", kept)
    if engines.desired > engines.replicas:
        return Decision(
            Action.SCALE, engines.desired, reasons.SCALING, f"to {counted(engines.desired, 'engine')}"
        )
    if not engines.observed:
        return Decision(Action.WAIT, engines.replicas, reasons.STARTING, "the StatefulSet is new")
    broken = next((pod for pod in _outdated(engines) if pod.broken), None)
    if broken is not None:
        return Decision(
            Action.EVICT,
            engines.replicas,
            reasons.ROLLING,
            f"{broken.name} is replaced: it is broken",
            broken,
        )
    if engines.desired < engines.replicas:
        return _shrink(engines, engines.replicas)
    return _roll(engines, engines.replicas)


def _shrink(engines: Engines, replicas: int) -> Decision:
    leaving = _leaving(engines)
    if leaving is not None:
        return Decision(Action.WAIT, replicas, reasons.SCALING, f"{leaving.name} is leaving")
    last = next((pod for pod in _present(engines) if pod.ordinal == replicas - 1), None)
    if last is not None and last.serving and not last.broken:
        drain = engines.drain(last)
        if drain is Drain.NONE:
            return Decision(Action.DRAIN, replicas, reasons.DRAINING, f"{last.name} drains", last)
        if drain is Drain.RUNNING:
            return Decision(Action.WAIT, replicas, reasons.DRAINING, f"{last.name} drains")
    return Decision(Action.SCALE, replicas - 1, reasons.SCALING, f"to {counted(engines.desired, 'engine')}")


def _roll(engines: Engines, replicas: int) -> Decision:
    outdated, present = _outdated(engines), _present(engines)
    fresh = [pod for pod in present if pod not in outdated]
    broken = next((pod for pod in fresh if pod.broken), None)
    if broken is not None:
        reason = reasons.STALLED if outdated else reasons.STARTING
        return Decision(Action.WAIT, replicas, reason, f"{broken.name}: {broken.broken}")
    leaving = _leaving(engines)
    if leaving is not None:
        return Decision(Action.WAIT, replicas, reasons.ROLLING, f"{leaving.name} is leaving")
    waiting = next((pod for pod in fresh if not pod.ready), None)
    if waiting is not None or len(present) < replicas:
        who = waiting.name if waiting is not None else "a pod"
        reason = reasons.ROLLING if outdated else reasons.STARTING
        return Decision(Action.WAIT, replicas, reason, f"{who} is starting")
    if not outdated:
        return Decision(Action.NONE, replicas, reasons.SETTLED)
    # One that serves nothing costs nothing.
    chosen = min(outdated, key=lambda pod: (pod.ready, -pod.ordinal))
    return Decision(Action.EVICT, replicas, reasons.ROLLING, f"{chosen.name} is replaced", chosen)


def _present(engines: Engines) -> list[Pod]:
    return sorted((pod for pod in engines.pods if not pod.terminating), key=lambda pod: pod.ordinal)


def _outdated(engines: Engines) -> list[Pod]:
    return [pod for pod in _present(engines) if pod.revision != engines.revision]


def _leaving(engines: Engines) -> Pod | None:
    return next((pod for pod in engines.pods if pod.terminating and not pod.stuck), None)


def _drained_for_nothing(pod: Pod, engines: Engines) -> bool:
    return pod.ordinal < engines.desired and engines.drain(pod) is not Drain.NONE and pod.serving
