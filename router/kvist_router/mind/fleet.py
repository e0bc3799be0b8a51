"""The set of replicas: follows discovery, runs health checks and feed readers for each.

Called by app.py. Decide apart from act: `changes` compares, `apply` starts and stops tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial

from kvist_router.discovery.source import Listed
from kvist_router.metrics import MindMetrics
from kvist_router.mind.drain import DrainAcknowledger
from kvist_router.mind.feed_reader import FeedReader
from kvist_router.mind.health import HealthChecker
from kvist_router.mind.mind import LocalMind
from kvist_router.mind.replica import Replica
from kvist_router.mind.supervise import supervised
from kvist_router.settings import IndexSettings, ReplicaSettings

TICK_SECONDS = 1.0

_log = logging.getLogger(__name__)


def changes(
    current: Iterable[ReplicaSettings], wanted: Iterable[ReplicaSettings]
) -> tuple[list[ReplicaSettings], list[ReplicaSettings]]:
    """(to remove, to add); a replica whose URL changed is removed and added."""
    old, new = list(current), list(wanted)
    return [item for item in old if item not in new], [item for item in new if item not in old]


class Fleet:
    """Owns the background tasks of every replica. `keep_series` drops the metrics of all not named."""

    def __init__(
        self,
        mind: LocalMind,
        index: IndexSettings,
        reader: FeedReader,
        acknowledger: DrainAcknowledger,
        health: HealthChecker,
        metrics: MindMetrics,
        keep_series: Callable[[Collection[str]], None],
    ) -> None:
        self._mind = mind
        self._index = index
        self._reader = reader
        self._acknowledger = acknowledger
        self._health = health
        self._metrics = metrics
        self._keep_series = keep_series
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._ticker = asyncio.create_task(supervised("tick", self._tick, metrics))

    async def apply(self, wanted: Iterable[Listed]) -> None:
        """Make the replicas those of `wanted`. Streams to a removed one go on; it gets no new requests."""
        listed = {item.replica.label: item for item in wanted}
        current = [replica.settings for replica in self._mind.replicas.values()]
        removed, added = changes(current, [item.replica for item in listed.values()])
        for settings in removed:
            await self._remove(settings.label)
        for settings in added:
            self._add(settings)
        for name, replica in self._mind.replicas.items():
            replica.listed(listed[name].ready, listed[name].draining)

    async def close(self) -> None:
        """Stop every task."""
        for name in list(self._tasks):
            await self._remove(name)
        await _cancel([self._ticker])

    def _add(self, settings: ReplicaSettings) -> None:
        replica = Replica(settings, self._index, self._mind.shared)
        replica.breaker = self._health.breaker()
        self._mind.replicas[replica.name] = replica
        loops = [("health", self._health.run)]
        if replica.agent is not None:
            loops += [("feed", self._reader.run), ("drain", self._acknowledger.run)]
        self._tasks[replica.name] = [
            asyncio.create_task(supervised(name, partial(run, replica), self._metrics)) for name, run in loops
        ]
        _log.info("replica %s at %s added", replica.name, replica.url)

    async def _remove(self, name: str) -> None:
        replica = self._mind.replicas.pop(name, None)
        await _cancel(self._tasks.pop(name, []))
        if replica is not None:
            replica.mirror.forget()
        self._metrics.forget(name)
        _log.info("replica %s removed", name)

    async def _tick(self) -> None:
        while True:
            self._mind.tick()
            self._keep_series(self._mind.replicas.keys())
            for replica in self._mind.replicas.values():
                self._metrics.healthy.labels(replica.name).set(replica.healthy)
                self._metrics.feed.labels(replica.name).set(replica.feed_live)
                self._metrics.breaker.labels(replica.name).set(replica.breaker.state != "closed")
                self._metrics.trust.labels(replica.name).set(replica.trust.share)
            await asyncio.sleep(TICK_SECONDS)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
