"""A tier below memory, as the agent uses it: fetch, store, make room, and the catalog's books on it.

Wraps an `EnvelopeStore`; never raises to its callers for what a store does wrong: a miss, a
bad chunk and a failing tier are all "not loaded", counted by cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.speed import Speed
from kvist_connector.errors import IntegrityError, StorageFull, TierError
from kvist_connector.protocol.tiers import Tier
from kvist_connector.tiers.envelope import HEADER_BYTES, EnvelopeStore, Header

log = logging.getLogger(__name__)


class LowerTier:
    """One lower tier. `limit`: bytes it may hold."""

    def __init__(
        self,
        tier: Tier,
        store: EnvelopeStore,
        limit: int,
        catalog: Catalog,
        busy: Busy,
        clock: Callable[[], float],
    ) -> None:
        self.tier = tier
        self._store = store
        self._limit = limit
        self._catalog = catalog
        self._busy = busy
        self._clock = clock
        self._fingerprint = b""
        self._foreign: dict[bytes, tuple[int, Header]] = {}  # other fingerprints: never served, first to go
        self._deleting: dict[bytes, asyncio.Task[None]] = {}
        self.speed = Speed()
        self.counts: Counter[str] = Counter()

    async def scan(self) -> None:
        """Learn what the tier holds; unreadable objects are counted and deleted."""
        async for key, size, found in self._store.scan():
            if isinstance(found, IntegrityError):
                self._spoiled(key, found)
            else:
                self._foreign[key] = (size, found)
        self.serve(self._fingerprint)

    def serve(self, fingerprint: bytes) -> None:
        """Offer the chunks of this fingerprint and hide all others."""
        if fingerprint != self._fingerprint:
            for key in self._catalog.keys(self.tier):
                self._hide(key)
        self._fingerprint = fingerprint
        own = [(key, found) for key, found in self._foreign.items() if found[1].fingerprint == fingerprint]
        for key, (size, header) in sorted(own, key=lambda item: item[1][1].index):
            del self._foreign[key]
            chunk = self._catalog.enter_below(
                self.tier, key, header.parent, header.index, size, self._clock()
            )
            chunk.tags = chunk.tags or header.tags

    async def fetch(self, key: bytes, into: Sequence[memoryview]) -> bool:
        """Fill the buffers; false when the chunk could not be had."""
        try:
            with self._busy.hold():
                header = await self._store.get(self._fingerprint, key, into)
        except IntegrityError as error:
            self._spoiled(key, error)
            return False
        except (TierError, StorageFull) as error:
            self._count("read_failed", error)
            return False
        if header is None:
            self.counts["read_missing"] += 1
            self._catalog.leave_below(self.tier, key)
            return False
        return True

    async def store(self, chunk: Chunk, parts: Sequence[memoryview]) -> bool:
        """Write the chunk, evicting as needed; false when there is no room or the tier fails."""
        with self._busy.hold():
            fingerprint = self._fingerprint
            deleting = self._deleting.get(chunk.key)
            if deleting is not None:
                await asyncio.wait([deleting])
            size = sum(part.nbytes for part in parts) + HEADER_BYTES
            try:
                with self._parent_kept(chunk):
                    written = await self._write(chunk, parts, fingerprint, size)
                if not written:
                    return False
            except StorageFull as error:
                self._count("write_refused", error)
                return False
            except TierError as error:
                self._count("write_failed", error)
                return False
        if fingerprint == self._fingerprint:
            self._catalog.enter_below(self.tier, chunk.key, chunk.parent, chunk.index, size, self._clock())
        return True

    def drop_all(self) -> tuple[int, int]:
        """Forget every chunk now and delete the objects in the background; chunks and bytes."""
        keys = self._catalog.keys(self.tier)
        size = self._catalog.index(self.tier).bytes
        for key in keys:
            self._catalog.leave_below(self.tier, key)
            self._delete_soon(key)
        return len(keys), size

    async def settled(self) -> None:
        """Deletions under way are done."""
        while self._deleting:
            await asyncio.wait(list(self._deleting.values()))

    async def close(self) -> None:
        """Deletions end, the store is released."""
        await self.settled()
        await self._store.inner.close()

    @contextmanager
    def _parent_kept(self, chunk: Chunk) -> Iterator[None]:
        """Making room for a chunk must not evict the one it continues."""
        index = self._catalog.index(self.tier)
        node = index.get(chunk.parent)
        if node is not None:
            index.block(chunk.parent)
        try:
            yield
        finally:
            if node is not None and index.get(chunk.parent) is node:
                index.unblock(chunk.parent)

    async def _write(self, chunk: Chunk, parts: Sequence[memoryview], fingerprint: bytes, size: int) -> bool:
        if not await self._make_room(size):
            self.counts["write_refused"] += 1
            return False
        for attempt in range(2):
            try:
                await self._store.put_if_absent(
                    parts,
                    fingerprint=fingerprint,
                    key=chunk.key,
                    parent=chunk.parent,
                    index=chunk.index,
                    tags=chunk.tags,
                )
            except StorageFull:
                # The file system is fuller than our own limit: give up one chunk, try once more.
                if attempt or not await self._evict_one():
                    raise
            else:
                return True
        return False

    async def _make_room(self, size: int) -> bool:
        if size > self._limit:
            return False
        while (await self._store.inner.capacity()).used + size > self._limit:
            if not await self._evict_one():
                return False
        return True

    async def _evict_one(self) -> bool:
        if self._deleting:
            await self.settled()
            return True
        if self._foreign:
            key = next(iter(self._foreign))
            del self._foreign[key]
        else:
            victim = self._catalog.victim(self.tier)
            if victim is None:
                return False
            key = victim.key
            self._catalog.leave_below(self.tier, key)
        self.counts["evicted"] += 1
        self._delete_soon(key)
        await self.settled()
        return True

    def _spoiled(self, key: bytes, error: IntegrityError) -> None:
        self._count("corrupt", error)
        self._catalog.leave_below(self.tier, key)
        self._delete_soon(key)

    def _hide(self, key: bytes) -> None:
        chunk = self._catalog.get(key)
        node = self._catalog.index(self.tier).get(key)
        if chunk is not None and node is not None:
            header = Header(
                fingerprint=self._fingerprint,
                key=key,
                parent=chunk.parent,
                index=chunk.index,
                ranks=0,
                raw_bytes=0,
                stored_bytes=0,
                checksum=b"",
                tags=chunk.tags,
            )
            self._foreign[key] = (node.size, header)
        self._catalog.leave_below(self.tier, key)

    def _delete_soon(self, key: bytes) -> None:
        if key not in self._deleting:
            task = asyncio.get_running_loop().create_task(self._delete(key))
            self._deleting[key] = task
            task.add_done_callback(lambda _: self._deleting.pop(key, None))

    async def _delete(self, key: bytes) -> None:
        try:
            await self._store.inner.delete(key)
        except TierError as error:
            self._count("delete_failed", error)

    def _count(self, cause: str, error: Exception) -> None:
        # Logged once per cause: a failing disk must not fill the log as well.
        if not self.counts[cause]:
            log.warning("%s tier: %s: %s (further ones are only counted)", self.tier.label, cause, error)
        self.counts[cause] += 1
