"""Placement `exclusive`: a chunk is in memory or on this agent's disk, in both only while it moves.

    promoted  read from the disk for a request: once it is in memory its file is deleted
    demoted   the least valuable of memory: written to the disk, then its slot is free

The copy is made before the other one goes, so that a kill in between leaves two and never none; what
is then in both places leaves one by its next move. Pinned chunks keep every place they have, leased ones are
not demoted. Redis and object store belong to the whole cluster: no agent's move takes anything out of
them, and they are written behind as ever. Demotion runs ahead of need and nobody waits for it but
loads; where stores outrun it, or the disk takes nothing, the least valuable chunk is dropped and counted.

Called by parts.py (wired), loads.py (room, promotions) and the supervisor (`run`); all on the agent's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.lower import LowerTier, Stored
from kvist_connector.agent.memory import MemoryTier
from kvist_connector.protocol.tiers import Tier

log = logging.getLogger(__name__)
# Slots that are kept empty: what an engine is granted at once, or this share of a small arena.
_MOST_EMPTY: Final = 64
_SHARE: Final = 8


def kept_empty(slots: int) -> int:
    """How many of an arena's slots are to be empty at rest."""
    return min(_MOST_EMPTY, max(1, slots // _SHARE)) if slots else 0


class Exclusive:
    """Moves between memory and `disk`; `counts` gets what was done."""

    def __init__(self, memory: MemoryTier, catalog: Catalog, disk: LowerTier, counts: Counter[str]) -> None:
        self._memory = memory
        self._catalog = catalog
        self._disk = disk
        self._counts = counts
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()

    def changed(self) -> None:
        """A chunk came into memory: there may be less room than there should be."""
        self._wake.set()

    def promoted(self, key: bytes, tier: Tier) -> None:
        """A chunk that was read from this tier is in memory now."""
        self.changed()
        chunk = self._catalog.resident(key)
        if tier != self._disk.tier or chunk is None or chunk.pinned:
            return
        if self._disk.drop(key) is not None:
            self._counts["promoted"] += 1

    def evicted(self, chunk: Chunk) -> None:
        """Memory gave up a chunk because somebody could not wait."""
        if chunk.below:
            return
        if not self._counts["dropped_undemoted"]:
            log.warning(
                "%s tier: takes chunks slower than memory needs room: the least valuable are dropped "
                "(further ones are only counted, as dropped_undemoted)",
                self._disk.tier.label,
            )
        self._counts["dropped_undemoted"] += 1

    async def run(self) -> None:
        """Demote ahead of need, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            slots = self._memory.slots
            await self.make_room(kept_empty(slots.size) if slots is not None else 0)

    async def make_room(self, count: int) -> None:
        """Demote until so many slots are empty, or nothing more can be demoted."""
        if self._has(count):
            return
        async with self._turn:
            while not self._has(count):
                chunk = self._catalog.next_victim(Tier.MEMORY)
                if chunk is None and self._memory.fresh:
                    self._memory.settle_fresh(self._memory.fresh - 1)
                elif chunk is None or not await self._demote(chunk):
                    return

    def _has(self, count: int) -> bool:
        slots = self._memory.slots
        return slots is None or slots.empty >= count

    async def _demote(self, chunk: Chunk) -> bool:
        """False when the disk does not take it."""
        written, tags = Stored.PRESENT, chunk.tags
        if self._disk.tier not in chunk.below:
            with self._memory.held(chunk) as parts:
                written = await self._disk.store(chunk, parts)
        if not written.there:
            self._counts["demotions_refused"] += 1
            return False
        if written is Stored.WRITTEN:
            self._counts[f"bytes_stored_{self._disk.tier.label}"] += self._memory.chunk_bytes
        here = self._catalog.resident(chunk.key) is chunk
        # A tag that came meanwhile is not in the file: what it retires must be known by it.
        if here and chunk.tags == tags and self._catalog.may_leave(Tier.MEMORY, chunk):
            self._memory.drop(chunk)
            self._counts["demoted"] += 1
        elif written is Stored.WRITTEN and not chunk.pinned:
            # It is in use again, or gone from memory by a control: what was true before stays true.
            self._counts["demotions_undone"] += 1
            if here or chunk.tags != tags:
                self._disk.drop(chunk.key)
        return True
