"""What changed conditions have to tell in events: trouble and its end, being ready and no longer so. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvist_operator.control.conditions import Condition, Type
from kvist_operator.control.resources import Object


@dataclass(frozen=True)
class News:
    """One event."""

    reason: str
    message: str
    warning: bool = False


def news(raw: Object, conditions: Sequence[Condition]) -> Iterator[News]:
    """`raw` has the conditions as they were."""
    before = {item["type"]: item for item in (raw.get("status") or {}).get("conditions") or ()}
    told = set()
    for condition in conditions:
        if condition.type is Type.DEGRADED:
            yield from _of_trouble(condition, before.get(str(condition.type), {}))
            told.add(condition.reason)
    for condition in conditions:
        if condition.type is Type.READY and condition.reason not in told:
            yield from _of_readiness(condition, before.get(str(condition.type), {}))


def _of_trouble(now: Condition, old: Mapping[str, Any]) -> Iterator[News]:
    if now.status and (old.get("status"), old.get("message")) != ("True", now.advice):
        yield News(now.reason, now.advice, warning=True)
    elif not now.status and old.get("status") == "True":
        yield News(now.reason, f"no longer {old.get('reason')}")


def _of_readiness(now: Condition, old: Mapping[str, Any]) -> Iterator[News]:
    if now.status and old.get("status") != "True":
        yield News(now.reason, "requests are served")
    elif not now.status and old.get("status") == "True":
        yield News(now.reason, f"no longer Ready: {now.advice}")
