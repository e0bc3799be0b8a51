"""Pins: chunks that no tier of this agent evicts until a time.

A pin protects what is there, it brings nothing in and ends with the last copy of its chunk. `clear`
leaves pinned chunks unless told otherwise, retirement does not. Called by edits.py; all on the agent's
loop. Pins end with the agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from kvist_connector.agent.catalog import Catalog, Chunk

MAX_PINS: Final = 65_536
# Of the slots of the arena: the rest is for whatever the engine does next.
PIN_SHARE: Final = 0.5


class Pins:
    """`slots`: of the arena, 0 without one."""

    def __init__(self, catalog: Catalog, clock: Callable[[], float], slots: Callable[[], int]) -> None:
        self._catalog = catalog
        self._clock = clock
        self._slots = slots
        self._until: dict[bytes, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._until)

    @property
    def room(self) -> int:
        """How many more chunks can be pinned."""
        slots = self._slots()
        most = min(MAX_PINS, max(1, int(slots * PIN_SHARE))) if slots else MAX_PINS
        return max(0, most - len(self._until))

    def holds(self, key: bytes) -> bool:
        """Whether the chunk is pinned."""
        return key in self._until

    def pin(self, chunks: Iterable[Chunk], seconds: float) -> list[Chunk]:
        """Pin, or set a new end; those that there was room for. A pin is never made shorter."""
        end = self._clock() + seconds
        pinned = []
        for chunk in chunks:
            if chunk.key not in self._until and not self.room:
                break
            self._until[chunk.key] = max(end, self._until.get(chunk.key, end))
            self._catalog.pin(chunk)
            pinned.append(chunk)
        self._arm()
        return pinned

    def unpin(self, keys: Iterable[bytes]) -> list[bytes]:
        """End pins; those that there were."""
        ended = [key for key in keys if self._until.pop(key, None) is not None]
        for key in ended:
            chunk = self._catalog.get(key)
            if chunk is not None:
                self._catalog.unpin(chunk)
        if ended:
            self._arm()
        return ended

    def expire(self) -> None:
        """End what is over."""
        now = self._clock()
        self.unpin([key for key, end in self._until.items() if end <= now])

    def close(self) -> None:
        """No timer is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self.close()
        if self._until:
            delay = max(0.0, min(self._until.values()) - self._clock())
            # A little later: the loop's clock may be the coarser one.
            self._timer = asyncio.get_running_loop().call_later(delay + 0.001, self.expire)
