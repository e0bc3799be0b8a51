"""Requests that no replica can take now, and what they wait for. Called by mind.py.

With `limits.queue_seconds` a pool whose only replica restarts answers late instead of with errors. While
another replica can be expected, one that drains gets nothing; when the time is over it is better than none.
Bounded by `limits.in_flight`, which counts waiting requests too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from kvist_router.errors import Unavailable
from kvist_router.metrics import MindMetrics
from kvist_router.mind.eligible import eligible
from kvist_router.mind.interface import Metadata
from kvist_router.mind.replica import Replica


class Waiting:
    """`replicas` is the mind's own map; `look` is called about once a second."""

    def __init__(self, replicas: Mapping[str, Replica], seconds: float, metrics: MindMetrics) -> None:
        self._replicas = replicas
        self._seconds = seconds
        self._metrics = metrics
        self._news = asyncio.Event()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def look(self) -> None:
        """Let those that wait look again."""
        if self._count:
            self._news.set()
            self._news = asyncio.Event()

    async def replicas(self, model: str | None, metadata: Metadata) -> list[Replica]:
        """Replicas that can take a request, waiting for one that should; raises Refused."""
        try:
            found = eligible(list(self._replicas.values()), model, metadata.exclude)
        except Unavailable:
            if not self._seconds or self._failed_only(metadata):
                raise
        else:
            if not self._seconds or any(replica.takes for replica in found):
                return found
        self._count += 1
        self._metrics.waiting.set(self._count)
        try:
            # When the time is over whoever is left is taken, or the refusal sent.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    while not any(_takes(replica, model) for replica in self._replicas.values()):
                        await self._news.wait()
        finally:
            self._count -= 1
            self._metrics.waiting.set(self._count)
        # What failed this request before may be the one that came back.
        return eligible(list(self._replicas.values()), model, ())

    def _failed_only(self, metadata: Metadata) -> bool:
        """Whether the only replicas up are those that failed this request: they would fail it again."""
        return any(name in self._replicas and self._replicas[name].serves for name in metadata.exclude)


def _takes(replica: Replica, model: str | None) -> bool:
    return replica.takes and bool(replica.models) and (model is None or model in replica.models)
