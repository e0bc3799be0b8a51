"""Uses of chunks on their way into the eviction order, a few at a time.

Called by the loader. Those of a long prompt take longer than its answer: the next lookup is not to
wait for all of them, so messages are received between the pieces. Nor does the thread that the answer
woke: it may have been put on this core, so the core is given away first (3 ms of a lookup's p99). Whatever
needs the order meanwhile has all of them entered before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvist_connector.agent.catalog import Chunk

PIECE: Final = 16  # 0.15 ms of one core, with a million chunks whose books are in no cache
PAUSE: Final = 0.001  # seconds until the first; no event loop sleeps shorter
MOST_WAITING: Final = 65_536  # beyond it they are entered at once


class Touches:
    """`touch` enters one use at a time of the clock."""

    def __init__(self, touch: Callable[[Chunk, float], None]) -> None:
        self._touch = touch
        self._waiting: deque[tuple[Sequence[Chunk], float]] = deque()
        self._done = 0  # of the first that waits
        self._count = 0
        self._scheduled = False

    def add(self, chunks: Sequence[Chunk], now: float) -> None:
        """These were used now."""
        if not chunks:
            return
        self._waiting.append((chunks, now))
        self._count += len(chunks)
        while self._count > MOST_WAITING:
            self._enter()
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(PAUSE, self._go_on)

    def settle(self) -> None:
        """Enter all that wait now."""
        while self._waiting:
            self._enter()

    def _go_on(self) -> None:
        self._enter()
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _enter(self) -> None:
        if not self._waiting:
            return
        chunks, now = self._waiting[0]
        piece = chunks[self._done : self._done + PIECE]
        self._done += len(piece)
        self._count -= len(piece)
        if self._done == len(chunks):
            self._waiting.popleft()
            self._done = 0
        for chunk in piece:
            self._touch(chunk, now)
