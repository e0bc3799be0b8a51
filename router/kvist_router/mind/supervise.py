"""Background loops that must not die silently. Called by mind/fleet.py and the compositions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from prometheus_client import Counter

RESTART_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Counted(Protocol):
    """Metrics with a counter of failures by task."""

    @property
    def task_failures(self) -> Counter:
        """Its one label is the task's name."""


async def supervised(name: str, loop: Callable[[], Awaitable[None]], metrics: Counted) -> None:
    """Run `loop` for ever: an error is counted, logged with its trace, and the loop starts again."""
    while True:
        try:
            await loop()
        except Exception:  # noqa: BLE001 - the boundary of every background task
            metrics.task_failures.labels(name).inc()
            _log.exception("background task %s failed; it starts again in %s s", name, RESTART_SECONDS)
        await asyncio.sleep(RESTART_SECONDS)


@asynccontextmanager
async def background(name: str, loop: Callable[[], Awaitable[None]], metrics: Counted) -> AsyncIterator[None]:
    """`loop`, supervised, while the context lasts."""
    task = asyncio.create_task(supervised(name, loop, metrics))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
