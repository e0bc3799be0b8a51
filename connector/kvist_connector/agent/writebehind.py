"""Committed chunks go to the lower tiers after the fact, once, and never in anybody's way.

A deferred tier is one that gets them some other way (exclusive.py), and from here when memory may be lost.

Every tier has a queue of its own, so that a slow one holds up no other. What is likeliest to be used
again is written first, no chunk before the one it continues. A queue is bounded by the bytes it would
write: under pressure the least valuable chunk is dropped from it (it stays in memory), nobody waits.
While a chunk is written it is leased. A tier that fails is written to again once it answers: what it
was to get waits in the queue until then.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Container, Mapping
from typing import Final

from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.lower import LowerTier, Presence, Stored
from kvist_connector.agent.memory import MemoryTier
from kvist_connector.protocol.tiers import Tier

log = logging.getLogger(__name__)
# A full queue loses this part of it at once: else every commit would look through all of it.
_SHARE: Final = 32
# Chunks among which the next one to be written is chosen.
_LOOKS: Final = 64


class WriteBehind:
    """`run` is the background task; everything else is called on the loop."""

    def __init__(
        self,
        memory: MemoryTier,
        catalog: Catalog,
        lower: Mapping[Tier, LowerTier],
        limit: int,
        deferred: Container[Tier] = (),
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._memory = memory
        self._catalog = catalog
        self._writers = [_Writer(memory, catalog, tier, limit, self.counts) for tier in lower.values()]
        self._deferred = [
            writer for tier, writer in zip(lower, self._writers, strict=True) if tier in deferred
        ]

    @property
    def pending_chunks(self) -> int:
        """Chunks not yet written, those being written included, once for each tier that lacks them."""
        return sum(writer.pending for writer in self._writers)

    @property
    def pending_bytes(self) -> int:
        """Their bytes."""
        return self.pending_chunks * self._memory.chunk_bytes

    def add(self, key: bytes) -> None:
        """A chunk was committed by the engine."""
        for writer in self._writers:
            if writer not in self._deferred:
                writer.add(key)

    def late_tags(self, key: bytes) -> None:
        """A chunk has tags that copies in lower tiers may lack: these are stored anew."""
        for writer in self._writers:
            writer.late_tags(key)

    def adopted(self) -> None:
        """After a restart: whether copies of the tagged chunks in memory have the tags is not known."""
        tagged = [chunk for chunk in self._memory_chunks() if chunk.tags]
        for chunk in sorted(tagged, key=lambda chunk: chunk.index):
            for writer in self._writers:
                writer.late_tags(chunk.key, known=writer in self._deferred)

    def hurry(self) -> None:
        """This replica is about to go: queue all that tiers lack and have room for, most valuable first."""
        for writer in self._writers:
            writer.hurry()

    async def flush(self, deadline: float) -> bool:
        """Wait until nothing is pending; false when the deadline came first, or tiers are lost.

        A deferred tier gets what it lacks and has room for: whoever flushes may be about to lose memory.
        """
        for writer in self._deferred:
            writer.hurry()
        try:
            async with asyncio.timeout(deadline):
                for writer in self._writers:
                    await writer.stopped.wait()
        except TimeoutError:
            return False
        return not self.pending_chunks

    def _memory_chunks(self) -> list[Chunk]:
        found = map(self._catalog.resident, self._catalog.keys(Tier.MEMORY))
        return [chunk for chunk in found if chunk is not None]

    async def run(self) -> None:
        """Write for ever."""
        async with asyncio.TaskGroup() as group:
            for writer in self._writers:
                group.create_task(writer.run())
            # Without a lower tier there is nothing to do, and nothing that may end.
            await asyncio.Event().wait()


class _Writer:
    """The queue of one tier."""

    def __init__(
        self, memory: MemoryTier, catalog: Catalog, lower: LowerTier, limit: int, counts: Counter[str]
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._lower = lower
        self._limit = limit
        self._counts = counts
        self._queue: dict[bytes, None] = {}  # in order of commit
        self._late: set[bytes] = set()  # of the queue: the tier's copy may lack tags
        self._writing: bytes | None = None
        self._last: bytes | None = None  # the chunk written last, just now
        self._failed: bytes | None = None  # the chunk whose write failed last
        self._lost = False  # what is in the queue waits for a tier that has a problem
        self._pressed = False  # that it is too slow has been said
        self._work = asyncio.Event()
        self.stopped = asyncio.Event()  # nothing is pending, or nothing can be written now
        self.stopped.set()

    @property
    def pending(self) -> int:
        """Chunks not yet written, the one being written included."""
        return len(self._queue) + (self._writing is not None)

    def add(self, key: bytes) -> None:
        self._queue[key] = None
        while len(self._queue) > 1 and len(self._queue) * self._memory.chunk_bytes > self._limit:
            if not self._pressed:
                self._pressed = True
                log.warning(
                    "%s tier: takes chunks slower than they are computed: the least valuable are not written "
                    "(further ones are only counted, as dropped_pressure)",
                    self._lower.tier.label,
                )
            for least in self._least(max(1, len(self._queue) // _SHARE)):
                del self._queue[least]
                self._counts["dropped_pressure"] += 1
                if least in self._late:
                    # What a tag retires must be known by it: better no copy.
                    self._late.discard(least)
                    self._lower.drop(least)
        self._work.set()
        self._note()

    def late_tags(self, key: bytes, known: bool = True) -> None:
        """`known`: the books are right on whether the tier has the chunk."""
        if not known or key == self._writing or self._lower.tier in self._catalog.tiers_of(key):
            self._late.add(key)
            self.add(key)

    def hurry(self) -> None:
        memory, tier, size = self._catalog.order(Tier.MEMORY), self._lower.tier, self._memory.chunk_bytes
        known = memory.keys()
        lacking = [key for key in known if key not in self._queue and tier not in self._catalog.tiers_of(key)]
        nodes = [node for node in map(memory.get, (*self._queue, *lacking)) if node is not None]
        nodes.sort(key=lambda node: memory.worth(node.key), reverse=True)
        # Beyond the tier's room every chunk written would push out another one.
        room = self._limit if self._lower.room is None else min(self._limit, self._lower.room)
        most = max(len(self._queue), room // max(1, size))
        queue: dict[bytes, None] = {}
        for node in nodes:
            if len(queue) >= most:
                break
            queue |= dict.fromkeys(chunk.key for chunk in self._unwritten(node.key, queue))
        self._queue = dict.fromkeys(self._late) | queue
        if self._queue:
            self._work.set()
        self._note()

    async def run(self) -> None:
        """One chunk at a time: loads have the better right to the tier."""
        again: bytes | None = None  # failed, and is tried once more before any other
        while True:
            await self._work.wait()
            while self._queue:
                if self._lower.closed:
                    await self._wait()
                    continue
                key = again if again is not None and again in self._queue else self._next()
                self._writing, again = key, None
                del self._queue[key]
                try:
                    failed = not await self._write(key) and self._waits
                finally:
                    self._writing = None
                if failed:
                    self._queue, again = {key: None} | self._queue, key
                    await self._wait()
                elif key not in self._queue:
                    self._late.discard(key)
            self._work.clear()
            self._last = None
            self._note()

    def _next(self) -> bytes:
        """Of those committed first, the one likeliest to be used again, or what is before it in its chain."""
        first = list(itertools.islice(self._queue, _LOOKS))
        best = next((key for key in first if key in self._late), None) or max(first, key=self._worth)
        chain = self._unwritten(best)
        return chain[0].key if chain and chain[0].key in self._queue else best

    @property
    def _waits(self) -> bool:
        """Whether the tier takes nothing now but may soon."""
        return self._lower.asking or self._lower.closed

    def _note(self) -> None:
        if self._lost or not self.pending:
            self.stopped.set()
        else:
            self.stopped.clear()

    async def _wait(self) -> None:
        """Until the tier answers."""
        self._last = None
        try:
            while self._waits:
                self._lost = bool(self._lower.problem)
                self._note()
                # While it is being cleared it may be asked, too: that ends first.
                await (self._lower.asked() if self._lower.asking else self._lower.reopened())
        finally:
            self._lost = False
            self._note()

    async def _write(self, key: bytes) -> bool:
        """False when it should be tried again if the tier has failed."""
        if self._lower.tier in self._catalog.tiers_of(key):
            return key not in self._late or await self._retag(key)
        chain = self._unwritten(key)
        # Others may have taken away what it continues: then that is written again, or nothing is.
        while chain and chain[0].index and chain[0].parent != self._last:
            presence = await self._lower.confirm(chain[0].parent)
            if presence is Presence.UNKNOWN:
                self._counts[Stored.REFUSED] += 1
                return False
            if presence is Presence.THERE:
                break
            chain = self._unwritten(key)
        if not chain:
            self._counts["dropped_evicted"] += 1
        for chunk in chain:
            if not await self._store(chunk):
                if self._lower.closed:
                    return False
                # One that fails twice while the tier answers in between would be in the way for ever.
                given_up, self._failed = self._failed == chunk.key, chunk.key
                return given_up
        self._failed = None
        return True

    async def _retag(self, key: bytes) -> bool:
        chunk = self._catalog.get(key)
        if chunk is None:
            return True
        if chunk.ref is None:
            return await self._lower.retag(chunk, ())
        with self._memory.held(chunk) as parts:
            return await self._lower.retag(chunk, parts)

    def _unwritten(self, key: bytes, queued: Container[bytes] = ()) -> list[Chunk]:
        """The chunk and those before it that the tier lacks and that are not queued, first one first.

        None when a part is gone.
        """
        chain: list[Chunk] = []
        chunk = self._catalog.get(key)
        while chunk is not None and self._lower.tier not in chunk.below and chunk.key not in queued:
            if chunk.ref is None:
                return []
            chain.append(chunk)
            if chunk.index == 0:
                break
            chunk = self._catalog.get(chunk.parent)
        return chain[::-1] if chunk is not None else []

    async def _store(self, chunk: Chunk) -> bool:
        if chunk.ref is None or self._catalog.resident(chunk.key) is not chunk:
            return False
        with self._memory.held(chunk) as parts:
            stored = await self._lower.store(chunk, parts)
            if stored is Stored.PRESENT and chunk.tags:
                # Whoever stored it knew other tags.
                await self._lower.retag(chunk, parts)
        self._counts[stored.value] += 1
        if stored is Stored.WRITTEN:
            self._counts[f"bytes_stored_{self._lower.tier.label}"] += self._memory.chunk_bytes
        self._last = chunk.key if stored.there else None
        return stored.there

    def _least(self, count: int) -> list[bytes]:
        """The least valuable chunks in the queue, at most so many, on which no other one in it hangs."""
        chunks = [(key, self._catalog.resident(key)) for key in self._queue]
        parents = {chunk.parent for _, chunk in chunks if chunk is not None}
        return heapq.nsmallest(count, (key for key, _ in chunks if key not in parents), key=self._worth)

    def _worth(self, key: bytes) -> float:
        chunk, memory = self._catalog.resident(key), self._catalog.order(Tier.MEMORY)
        if chunk is None or key not in memory:
            return -1.0
        parent = self._catalog.get(chunk.parent)
        follows = chunk.parent in self._queue or chunk.parent == self._writing
        there = parent is not None and self._lower.tier in parent.below
        # A chunk whose predecessor was dropped is worth nothing below: lookups stop before it.
        return memory.worth(key) if chunk.index == 0 or follows or there else -1.0
