"""Committed chunks go to the lower tiers after the fact, once, and never in anybody's way.

The queue is bounded by the bytes it would write: under pressure the least valuable chunk is
dropped from it (it stays in memory), nobody waits. While a chunk is written it is leased.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.lower import LowerTier
from kvist_connector.agent.memory import MemoryTier
from kvist_connector.protocol.tiers import Tier


class WriteBehind:
    """`run` is the background task; everything else is called on the loop."""

    def __init__(
        self, memory: MemoryTier, catalog: Catalog, lower: Mapping[Tier, LowerTier], limit: int
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._lower = lower
        self._limit = limit
        self._queue: dict[bytes, None] = {}  # in order of commit: parents come before children
        self._writing: bytes | None = None
        self._work = asyncio.Event()
        self._done = asyncio.Event()
        self._done.set()
        self.counts: Counter[str] = Counter()

    @property
    def pending_chunks(self) -> int:
        """Chunks not yet written, the one being written included."""
        return len(self._queue) + (self._writing is not None)

    @property
    def pending_bytes(self) -> int:
        """Their bytes."""
        return self.pending_chunks * self._memory.chunk_bytes

    def add(self, key: bytes) -> None:
        """A chunk was committed by the engine."""
        if not self._lower:
            return
        self._queue[key] = None
        while len(self._queue) > 1 and len(self._queue) * self._memory.chunk_bytes > self._limit:
            del self._queue[self._least()]
            self.counts["dropped_pressure"] += 1
        self._done.clear()
        self._work.set()

    async def flush(self, deadline: float) -> bool:
        """Wait until nothing is pending; false when the deadline came first."""
        try:
            async with asyncio.timeout(deadline):
                await self._done.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Write for ever, one chunk at a time: loads have the better right to the disk."""
        while True:
            await self._work.wait()
            while self._queue:
                self._writing = next(iter(self._queue))
                del self._queue[self._writing]
                try:
                    await self._write(self._writing)
                finally:
                    self._writing = None
            self._work.clear()
            self._done.set()

    async def _write(self, key: bytes) -> None:
        for tier, lower in self._lower.items():
            if tier in self._catalog.tiers_of(key):
                continue
            chain = self._unwritten(key, tier)
            if not chain:
                self.counts["dropped_evicted"] += 1
            for chunk in chain:
                if not await self._store(chunk, tier, lower):
                    break

    def _unwritten(self, key: bytes, tier: Tier) -> list[Chunk]:
        """The chunk and those before it that the tier lacks, first one first; none when a part is gone."""
        chain: list[Chunk] = []
        chunk = self._catalog.get(key)
        while chunk is not None and tier not in chunk.below:
            if chunk.ref is None:
                return []
            chain.append(chunk)
            if chunk.index == 0:
                break
            chunk = self._catalog.get(chunk.parent)
        return chain[::-1] if chunk is not None else []

    async def _store(self, chunk: Chunk, tier: Tier, lower: LowerTier) -> bool:
        if chunk.ref is None or self._catalog.resident(chunk.key) is not chunk:
            return False
        self._memory.lease(chunk)
        try:
            written = await lower.store(chunk, self._memory.views(chunk.ref))
        finally:
            self._memory.unlease(chunk)
        self.counts["written" if written else "refused"] += 1
        if written:
            self.counts[f"bytes_stored_{tier.label}"] += self._memory.chunk_bytes
        return written

    def _least(self) -> bytes:
        """The least valuable chunk in the queue on which no other one in it hangs."""
        chunks = [(key, self._catalog.resident(key)) for key in self._queue]
        parents = {chunk.parent for _, chunk in chunks if chunk is not None}
        return min((key for key, _ in chunks if key not in parents), key=self._worth)

    def _worth(self, key: bytes) -> float:
        chunk, node = self._catalog.resident(key), self._catalog.index(Tier.MEMORY).get(key)
        if chunk is None or node is None:
            return -1.0
        parent = self._catalog.get(chunk.parent)
        follows = chunk.parent in self._queue or chunk.parent == self._writing
        # A chunk whose predecessor was dropped is worth nothing below: lookups stop before it.
        return node.priority if chunk.index == 0 or follows or (parent is not None and parent.below) else -1.0
