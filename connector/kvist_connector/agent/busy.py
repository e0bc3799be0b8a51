"""Counts work that threads do in the arena or the disk tier, so that others can wait for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Busy:
    """Used on one loop."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Work is under way inside the block."""
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when no work is under way; the work itself has deadlines or ends with its thread."""
        await self._idle.wait()
