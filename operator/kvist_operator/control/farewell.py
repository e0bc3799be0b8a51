"""Between the deletion of a CacheCluster and its end: shared tiers are cleared where the spec says so. Pure.

Only then the object carries a finalizer, and for at most `CLEAR_SECONDS` after its deletion while an operator
acts. As long as it is there Kubernetes leaves the children alone, so agents can be asked.
Called by parting.py, and by release.py, which takes the finalizer away when no operator will.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.control.pods import Pod, parse_time
from kvist_operator.control.resources import Object
from kvist_operator.render.kube.meta import ENGINE

FINALIZER: Final = "kvist.dev/clear-shared-tiers"
CLEAR_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Farewell:
    """What to do with a marked object under deletion.

    `ask` are the agents in the order in which they are asked, for at most `seconds`; empty: let it go.
    `stays` says why chunks stay in the shared tiers, empty when none were to be cleared.
    """

    ask: tuple[Pod, ...] = ()
    seconds: float = 0.0
    stays: str = ""


def marked(raw: Object) -> bool:
    """Whether the object waits for us when it is deleted."""
    return FINALIZER in (raw["metadata"].get("finalizers") or ())


def clears(raw: Object) -> bool:
    """Whether shared tiers that outlive the cluster are to be cleared; of the raw object, so that it is
    known of a spec that is wrong elsewhere too."""
    remote = _section(_section(raw.get("spec"), "cache"), "remote")
    lasting = _section(remote, "objectStore") or _section(remote, "redis").get("urls")
    return remote.get("whenDeleted") == "Clear" and bool(lasting)


def mark_patch(raw: Object, *, on: bool) -> Object | None:
    """JSON merge patch that sets or takes away the finalizer of just this version; None when it is so."""
    if marked(raw) == on:
        return None
    meta = raw["metadata"]
    others = [name for name in meta.get("finalizers") or () if name != FINALIZER]
    finalizers = [*others, FINALIZER] if on else others
    return {
        "metadata": {
            "uid": meta["uid"],
            "resourceVersion": meta["resourceVersion"],
            "finalizers": finalizers or None,
        }
    }


def farewell(raw: Object, pods: Iterable[Pod], now: datetime.datetime, failed: str = "") -> Farewell:
    """Decide; `failed` is why the last attempt did not work."""
    if not clears(raw):
        return Farewell()
    left = CLEAR_SECONDS - (now - parse_time(raw["metadata"]["deletionTimestamp"])).total_seconds()
    agents = [pod for pod in pods if pod.component == ENGINE and pod.address and not pod.stuck]
    if left <= 0:
        why = failed or "no operator acted"
        return Farewell(stays=f"they were not cleared within {CLEAR_SECONDS:g} s: {why}")
    if not agents:
        return Farewell(stays="no agent is left that could clear them")
    agents.sort(key=lambda pod: (pod.terminating, not pod.serving, pod.ordinal))
    return Farewell(tuple(agents), min(left, CLEAR_SECONDS))


def _section(value: Any, name: str) -> dict[str, Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}
