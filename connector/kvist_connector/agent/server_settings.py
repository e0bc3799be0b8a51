"""What every tier on other machines can be told: how long it may take, and how much at a time.

Fields of `RedisSettings`, `ObjectStoreSettings` and `PeerSettings`, and the breaker that they mean.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from pydantic import Field

from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.deadline import DeadlineStore

_FAILURES: Final = 3


class ServerSettings(Protocol):
    """The fields below."""

    @property
    def lookup_deadline(self) -> float:
        """Seconds for all questions of one lookup."""

    @property
    def deadline(self) -> float:
        """Seconds for one chunk."""

    @property
    def pause(self) -> float:
        """Seconds without a call after failures."""

    @property
    def concurrency(self) -> int:
        """Calls at a time that move bytes."""


def lookup_deadline(default: float, learn: str) -> Any:
    """A lookup waits to `learn`."""
    text = f"seconds that a lookup waits to learn {learn}; default {default:g}"
    return Field(default, gt=0, le=60, description=text)


def deadline(default: float, moving: str = "reading or writing") -> Any:
    """Of one chunk."""
    return Field(
        default, gt=0, le=600, description=f"seconds that {moving} one chunk may take; default {default:g}"
    )


def pause(default: float, failing: str) -> Any:
    """Of `failing` servers."""
    return Field(
        default, gt=0, le=3600, description=f"seconds that a {failing} is left alone; default {default:g}"
    )


def concurrency(default: int, moved: str = "read or written at a time") -> Any:
    """Chunks under way."""
    return Field(default, ge=1, le=256, description=f"chunks {moved}; default {default}")


def guarded(store: ChunkStore, settings: ServerSettings) -> ChunkStore:
    """Behind a breaker and with these limits."""
    return DeadlineStore(
        store,
        settings.deadline,
        failures=_FAILURES,
        pause=settings.pause,
        # The rest of a lookup's time is for a second question.
        ask=settings.lookup_deadline / 2,
        most=settings.concurrency,
    )
