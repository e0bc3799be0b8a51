"""Tells a draining replica's agent that nothing more comes from this router. Called by mind/fleet.py.

The agent's drain waits for it. An acknowledgement goes out when the feed says `draining` (from then on
eligible.py prefers every other replica) and when the last request there has ended; it carries the number
still running, which the agent cannot know so soon: a request may be on its way to the engine.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random

import aiohttp

from kvist_connector import names
from kvist_router.mind.agent_link import ASK_ERRORS, AgentLink, why_not
from kvist_router.mind.replica import Replica
from kvist_router.pauses import Pauses

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0

_log = logging.getLogger(__name__)


class DrainAcknowledger:
    """`seconds` is the deadline of one acknowledgement."""

    def __init__(
        self, session: aiohttp.ClientSession, link: AgentLink, seconds: float, random: Random
    ) -> None:
        self._session = session
        self._link = link
        self._timeout = aiohttp.ClientTimeout(total=seconds)
        self._random = random

    async def run(self, replica: Replica) -> None:
        """Acknowledge every drain until cancelled."""
        while True:
            await replica.drain_news.wait()
            replica.drain_news.clear()
            pauses = Pauses(FIRST_PAUSE, LONGEST_PAUSE, self._random)
            while replica.feed_live and replica.mirror.draining:
                problem = await self._tell(replica)
                if not problem:
                    break
                _log.warning("drain of %s not acknowledged: %s", replica.name, problem)
                await asyncio.sleep(pauses.next())

    async def _tell(self, replica: Replica) -> str:
        """What went wrong; empty when nothing did."""
        try:
            body = {"reader": self._link.reader, "in_flight": replica.outstanding_requests}
            url = f"{replica.agent}{names.PATH_DRAIN_ACKNOWLEDGE}"
            async with self._link.asked(self._session, "POST", url, self._timeout, json=body) as answer:
                return "" if answer.status == 200 else f"status {answer.status}"
        except ASK_ERRORS as error:
            return why_not(error)
