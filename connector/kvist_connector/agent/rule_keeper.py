"""Keeps what an agent and a shared tier know to be retired equal: at the start, after each rule, each minute.

Until the first exchange nothing is read from the tier. What the tier lost (its own eviction, a time to
live, an empty server) is put there again by whoever knows it. Used by shared.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from kvist_connector.agent.shared_rules import SharedRules
from kvist_connector.errors import TierError
from kvist_connector.protocol.retired import Retired

# Seconds between exchanges that nothing calls for.
PERIOD: Final = 60.0
_FIRST_PAUSE: Final = 0.05


class RuleKeeper:
    """`learn` makes the agent know; `trouble` returns when the tier has been asked again; `wrote`:
    these rules are new to the tier."""

    def __init__(
        self,
        rules: SharedRules,
        known: Callable[[], Retired],
        learn: Callable[[Retired], Awaitable[None]],
        trouble: Callable[[TierError], Awaitable[None]],
        wrote: Callable[[], None],
    ) -> None:
        self._rules = rules
        self._known = known
        self._learn = learn
        self._trouble = trouble
        self._wrote = wrote
        self._turn = asyncio.Lock()
        self._due = asyncio.Event()
        self.agreed = False  # the agent knows what the tier has said
        self.tried = asyncio.Event()
        self._tried_again = asyncio.Event()  # the next time

    async def run(self) -> None:
        """For ever."""
        pause = _FIRST_PAUSE
        while True:
            self._due.clear()
            try:
                await self.exchange()
            except TierError as error:
                self._tell()
                await self._trouble(error)
                # A tier that answers and takes nothing is not asked all the time.
                await asyncio.sleep(pause)
                pause = min(2 * pause, PERIOD)
                continue
            pause = _FIRST_PAUSE
            self._tell()
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD):
                    await self._due.wait()

    def _tell(self) -> None:
        self.tried.set()
        self._tried_again.set()
        self._tried_again = asyncio.Event()

    async def outcome(self) -> None:
        """Return after the next exchange by itself, however it ends."""
        await self._tried_again.wait()

    def due(self) -> None:
        """The agent knows more, or the tier may have less."""
        self._due.set()

    async def exchange(self) -> None:
        """Both know the same afterwards. Raises TierError."""
        async with self._turn:
            theirs = await self._rules.read()
            if not self._known().covers(theirs):
                await self._learn(theirs)
            self.agreed = True
            known = self._known()
            lacking = self._rules.damaged or not theirs.covers(known)
            if lacking and await self._rules.publish(known):
                self._wrote()
