"""Reads one agent's feed into its replica's mirror. Called by mind/fleet.py, supervised.

Whatever is wrong with the stream (gap, new epoch, undecodable frame, silence, refusal) ends this
connection; the next one brings a new snapshot. Pauses between connections grow and are bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random

import aiohttp

from kvist_connector import names
from kvist_connector.protocol.feed import FeedMessage, Snapshot
from kvist_connector.protocol.framing import FrameDecoder
from kvist_router.metrics import MindMetrics
from kvist_router.mind.agent_link import ASK_ERRORS, AgentLink, why_not
from kvist_router.mind.replica import Replica
from kvist_router.pauses import Pauses

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0

_log = logging.getLogger(__name__)


class FeedReader:
    """`apply` takes (replica, message) and raises FeedError; `now` is the mind's clock."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        link: AgentLink,
        silent_seconds: float,
        apply: Callable[[Replica, FeedMessage], None],
        now: Callable[[], float],
        random: Random,
        metrics: MindMetrics,
    ) -> None:
        self._session = session
        self._link = link
        self._silent_seconds = silent_seconds
        self._apply = apply
        self._now = now
        self._random = random
        self._metrics = metrics

    async def run(self, replica: Replica) -> None:
        """Follow the feed until cancelled."""
        pauses = Pauses(FIRST_PAUSE, LONGEST_PAUSE, self._random)
        try:
            while True:
                problem = await self._connection(replica)
                good = replica.feed_live and replica.mirror.complete
                if replica.feed_problem != problem:  # once per cause
                    _log.warning("feed of %s: %s", replica.name, problem)
                if replica.feed_live:
                    self._metrics.feed_breaks.labels(replica.name).inc()
                replica.feed_lost(problem, self._now())
                if good:
                    pauses.anew()
                await asyncio.sleep(pauses.next())
        finally:
            replica.feed_lost("not followed any more", self._now())

    async def _connection(self, replica: Replica) -> str:
        """One connection, from snapshot to its end; returns why it ended."""
        try:
            async with self._link.stream(
                self._session,
                f"{replica.agent}{names.PATH_FEED}",
                self._silent_seconds,
                params={"reader": self._link.reader, "acknowledges": "1"},
            ) as response:
                await self._frames(replica, response)
                return "the agent ended the stream"
        except ASK_ERRORS as error:
            return why_not(error, "no frame in time")

    async def _frames(self, replica: Replica, response: aiohttp.ClientResponse) -> None:
        decoder: FrameDecoder[FeedMessage] = FrameDecoder(FeedMessage)
        async for data in response.content.iter_any():
            for message in decoder.feed(data):
                self._apply(replica, message)
                if isinstance(message, Snapshot):
                    await asyncio.sleep(0)  # snapshots are long: let requests through between parts
