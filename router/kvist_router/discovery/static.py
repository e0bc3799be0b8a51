"""Replicas of the settings: one list, for ever. Called by app.py."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvist_router.discovery.source import Listed
from kvist_router.settings import ReplicaSettings


class StaticSource:
    """See source.Source."""

    problem = ""

    def __init__(self, replicas: tuple[ReplicaSettings, ...]) -> None:
        self._replicas = replicas

    async def watch(self) -> AsyncIterator[tuple[Listed, ...]]:
        """The one list."""
        yield tuple(Listed(replica) for replica in self._replicas)
