"""Follows one other router's dispatches. Called by circle.py, supervised.

Whatever is wrong with the stream ends the connection; what was heard is taken back, and the next one says
anew what runs. Pauses between connections grow and are bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from random import Random
from typing import Final

import aiohttp

from kvist_connector import names
from kvist_connector.protocol.framing import FrameDecoder
from kvist_router.errors import FeedError
from kvist_router.mind.agent_link import ASK_ERRORS, AgentLink, why_not
from kvist_router.mind.neighbours.known import Known
from kvist_router.mind.neighbours.messages import Opening, Said, check
from kvist_router.mind.replica import Replica
from kvist_router.pauses import Pauses

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
CAPACITY: Final = 8192  # requests of one router that are counted

_log = logging.getLogger(__name__)


class Neighbour:
    """The router behind one address. `heard`: its stream is live; `is_self`: it is this router.

    `is_twin`: it is heard at another address, too.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.router, self.instance = "", b""
        self.heard = False
        self.is_self = self.is_twin = False
        self.problem = "not connected yet"


class DispatchReader:
    """`now` is the mind's clock."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        link: AgentLink,
        silent_seconds: float,
        instance: bytes,
        replicas: Mapping[str, Replica],
        now: Callable[[], float],
        random: Random,
    ) -> None:
        self._session, self._link, self._instance = session, link, instance
        self._silent_seconds = silent_seconds
        self._replicas, self._now, self._random = replicas, now, random
        self._heard: set[bytes] = set()  # instances

    async def run(self, neighbour: Neighbour) -> None:
        """Follow it until cancelled, or until it turns out to be this router."""
        pauses = Pauses(FIRST_PAUSE, LONGEST_PAUSE, self._random)
        while not neighbour.is_self:
            problem = await self._connection(neighbour)
            good = neighbour.heard
            if problem != neighbour.problem and not neighbour.is_twin:  # once per cause
                _log.warning("dispatches of the router at %s: %s", neighbour.url, problem)
            neighbour.heard, neighbour.problem = False, problem
            if good:
                pauses.anew()
            await asyncio.sleep(pauses.next())
        await asyncio.Event().wait()

    async def _connection(self, neighbour: Neighbour) -> str:
        known = Known(neighbour.url, self._replicas, CAPACITY)
        neighbour.is_twin = False
        try:
            url = neighbour.url + names.PATH_DISPATCHES
            async with self._link.stream(self._session, url, self._silent_seconds) as response:
                await self._frames(neighbour, known, response)
                return "it ended the stream" if neighbour.heard else neighbour.problem
        except ASK_ERRORS as error:
            return why_not(error, "no frame in time")
        finally:
            known.forget()
            if neighbour.heard:
                self._heard.discard(neighbour.instance)

    async def _frames(self, neighbour: Neighbour, known: Known, response: aiohttp.ClientResponse) -> None:
        decoder: FrameDecoder[Said] = FrameDecoder(Said)
        async for data in response.content.iter_any():
            for message in decoder.feed(data):
                check(message)
                if isinstance(message, Opening):
                    self._open(neighbour, message)
                    if not neighbour.heard:
                        return
                elif not neighbour.heard:
                    raise FeedError("the stream does not begin with an opening")
                known.hear(message, self._now())

    def _open(self, neighbour: Neighbour, opening: Opening) -> None:
        neighbour.router, neighbour.problem = opening.router, ""
        neighbour.instance = opening.instance
        neighbour.is_self = opening.instance == self._instance
        neighbour.is_twin = opening.instance in self._heard
        neighbour.heard = not (neighbour.is_self or neighbour.is_twin)
        if neighbour.heard:
            self._heard.add(opening.instance)
