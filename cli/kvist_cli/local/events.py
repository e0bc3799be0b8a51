"""What a starting, running or stopping cluster tells its owner, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """What happened."""

    NOTE = "note"  # a step of preparation, or a remark; no program
    STARTING = "starting"  # the process exists, its health check does not pass yet
    READY = "ready"  # `seconds` since it was started
    EXITED = "exited"  # ended although nobody asked it to
    RESTARTING = "restarting"  # will be started again after a back-off of `seconds`
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"  # given up; the cluster goes on without it


@dataclass(frozen=True)
class Event:
    """One thing that happened. `program` is "" for the cluster as a whole."""

    kind: EventKind
    program: str
    message: str
    seconds: float = 0.0


OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """For callers that do not want to hear."""
