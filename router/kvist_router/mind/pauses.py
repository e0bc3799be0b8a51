"""Pauses between connections to one agent or router. Used by feed_reader.py and neighbours/reader.py."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

FIRST_PAUSE: Final = 0.05


class Pauses:
    """Each is twice the one before, up to `longest`, and shorter by chance: readers come one by one."""

    def __init__(self, longest: float, random: Random) -> None:
        self._longest = longest
        self._random = random
        self._next = FIRST_PAUSE

    async def after(self, good: bool) -> None:
        """The pause after a connection; a good one begins anew with the shortest."""
        if good:
            self._next = FIRST_PAUSE
        await asyncio.sleep(self._next * self._random.uniform(0.5, 1.0))
        self._next = min(self._longest, 2 * self._next)
