"""The status of a CacheCluster, and whether it is worth a write. Pure.

Called by reconcile.py. Figures are rounded; a status in which only
figures differ is written at most once a minute.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvist_operator.control.conditions import Condition
from kvist_operator.control.resources import CLUSTERS, Object
from kvist_operator.control.snapshot import Snapshot
from kvist_operator.control.views import Figures, RouterView, total
from kvist_operator.render.kube.meta import APP, ENGINE, LABEL_COMPONENT, LABEL_INSTANCE, LABEL_NAME

FIGURES_SECONDS: Final = 60.0
_FIGURES: Final = ("hit", "figures")


def status_of(snapshot: Snapshot, conditions: Iterable[Condition], endpoint: str) -> Object:
    """What `.status` shall be."""
    counted = total(snapshot.views.values())
    engines = [pod for pod in snapshot.of(ENGINE) if not pod.terminating]
    return {
        **blocked_status(snapshot.raw, conditions, snapshot.now),
        "replicas": len(engines),
        "readyReplicas": sum(pod.ready for pod in engines),
        "selector": selector_text(snapshot.name),
        "endpoint": endpoint,
        "engines": _engines(snapshot),
        **hits(counted),
    }


def blocked_status(raw: Object, conditions: Iterable[Condition], now: datetime.datetime) -> Object:
    """The old status with these conditions put in; the others stay."""
    old = raw.get("status") or {}
    before = {item["type"]: item for item in old.get("conditions") or ()}
    generation, stamp = raw["metadata"]["generation"], now.strftime("%Y-%m-%dT%H:%M:%SZ")
    fresh = {
        str(item.type): item.as_object(generation, before.get(str(item.type)), stamp) for item in conditions
    }
    merged = [fresh.pop(name, item) for name, item in before.items()] + list(fresh.values())
    return {**old, "observedGeneration": generation, "conditions": merged}


def worth_writing(old: Object, new: Object, since_write: float) -> float | None:
    """0: write now. Seconds: only figures differ, write then. None: nothing differs."""
    if old == new:
        return None
    if _without_figures(old) != _without_figures(new):
        return 0.0
    return max(0.0, FIGURES_SECONDS - since_write)


def status_patch(raw: Object, status: Object) -> Object:
    """The object to apply; with its uid, so that it is never the status of another of the same name."""
    meta = raw["metadata"]
    return {
        "apiVersion": CLUSTERS.api_version,
        "kind": CLUSTERS.kind,
        "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
        "status": status,
    }


def selector_text(name: str) -> str:
    """Label selector of the engine pods, for the scale subresource."""
    return f"{LABEL_NAME}={APP},{LABEL_INSTANCE}={name},{LABEL_COMPONENT}={ENGINE}"


def _engines(snapshot: Snapshot) -> list[Object]:
    views, revision = list(snapshot.views.values()), snapshot.engines.revision
    pods = sorted(snapshot.of(ENGINE), key=lambda pod: pod.ordinal)
    return [
        {
            "name": pod.name,
            "ready": pod.ready,
            "current": pod.revision == revision,
            "mirrored": _mirrored(pod.name, views),
            "draining": pod.terminating or pod.name in snapshot.drains,
            **({"problem": pod.broken} if pod.broken else {}),
        }
        for pod in pods
    ]


def _mirrored(engine: str, views: list[RouterView]) -> bool:
    return bool(views) and all(view.mirrors(engine) for view in views)


def hits(counted: Figures) -> Object:
    """The part of the status that says what was reused, rounded."""
    if not counted.requests:
        return {"hit": "-"}
    tokens = _percent(counted.hit_tokens, counted.tokens)
    return {
        "hit": f"{tokens}%",
        "figures": {
            "requestHitPercent": _percent(counted.hit_requests, counted.requests),
            "tokenHitPercent": tokens,
            "savedSecondsEstimated": _two_digits(counted.saved_seconds),
        },
    }


def _percent(part: float, whole: float) -> int:
    return round(100 * part / whole) if whole else 0


def _two_digits(value: float) -> int:
    """Two significant digits: a figure for people, which need not be written anew all the time."""
    return int(float(f"{max(0.0, value):.2g}"))


def _without_figures(status: Mapping[str, Any]) -> Object:
    return {name: value for name, value in status.items() if name not in _FIGURES}
