"""The contract of a source of replicas. Called by mind/fleet.py through app.py.

One suite runs over every source: tests/router/test_discovery.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kvist_router.settings import ReplicaSettings


@dataclass(frozen=True, slots=True)
class Listed:
    """A replica, and what its source says of it: one that is not `ready` is mirrored, but not chosen."""

    replica: ReplicaSettings
    ready: bool = True
    draining: bool = False


class Source(Protocol):
    """Gives whole lists. Whatever goes wrong leaves the last list in force and is said in `problem`."""

    @property
    def problem(self) -> str:
        """Why the list is missing or may be old; empty when neither."""

    def watch(self) -> AsyncIterator[tuple[Listed, ...]]:
        """Whole lists, each time something has changed. Never raises for what is wrong outside."""
