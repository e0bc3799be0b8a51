"""Replicas of the settings: one list, for ever. Called by app.py."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvist_router.settings import ReplicaSettings


async def static(replicas: tuple[ReplicaSettings, ...]) -> AsyncIterator[tuple[ReplicaSettings, ...]]:
    """The one list."""
    yield replicas
