"""A lower tier that this agent has to itself: listed at start, kept within its limit by eviction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.deletion_log import DeletionLog
from kvist_connector.agent.lower import LowerTier, Presence
from kvist_connector.errors import IntegrityError, StorageFull
from kvist_connector.protocol.tiers import Tier
from kvist_connector.tiers.envelope import EnvelopeStore, Header
from kvist_connector.tiers.hang import guard_of

log = logging.getLogger(__name__)

# A few files that cannot be deleted hinder nothing; from so many on no chunk is given up for them.
_MOST_STUCK: Final = 8
# So long deletions may stand still before whoever waits for them is told.
DELETING_SECONDS: Final = 10.0


class OwnTier(LowerTier):
    """`limit`: bytes it may hold. While its store hangs it offers nothing; what it gave up stays away."""

    def __init__(
        self,
        tier: Tier,
        store: EnvelopeStore,
        limit: int,
        catalog: Catalog,
        busy: Busy,
        clock: Callable[[], float],
        deletions: DeletionLog,
    ) -> None:
        super().__init__(tier, store, catalog, busy, clock)
        self._limit = limit
        self._deletions = deletions
        self._foreign: dict[bytes, tuple[int, Header]] = {}  # other fingerprints: never served, first to go
        self._stuck: dict[bytes, None] = {}  # their deletion failed: never served, tried again for room
        self._guard = guard_of(store.inner)
        if self._guard is not None:
            self._guard.on_change = self._hang_changed

    @property
    def room(self) -> int:
        """See LowerTier."""
        return max(0, self._limit - self._catalog.index(self.tier).bytes)

    async def scan(self) -> None:
        """Learn what the tier holds; unreadable objects are counted and deleted."""
        doomed = set(self._deletions.read())
        self._deletions.keep(doomed)
        async for key, size, found in self._store.scan():
            if key in doomed:
                self._delete_soon(key, self._fingerprint)
            elif isinstance(found, IntegrityError):
                self._spoiled(key, found)
            else:
                self._foreign[key] = (size, found)
        self.serve(self._fingerprint)
        self._has_deleted()

    def serve(self, fingerprint: bytes) -> None:
        """Offer the chunks of this fingerprint and hide all others."""
        if fingerprint != self._fingerprint:
            for key in self._catalog.keys(self.tier):
                self._hide(key)
        self._fingerprint = fingerprint
        if self._hangs:
            return
        own = [(key, found) for key, found in self._foreign.items() if found[1].fingerprint == fingerprint]
        parents = {key: header.parent for key, (_, header) in own}
        for key, (size, header) in sorted(own, key=lambda item: item[1][1].index):
            del self._foreign[key]
            if self.authority.retires(
                key, header.parent, header.index, header.retire_epoch, header.tags, parents
            ):
                self.counts["retired"] += 1
                self._delete_soon(key, fingerprint)
                self._catalog.on_gone(key)
                continue
            chunk = self._enter(key, header.parent, header.index, size)
            self._catalog.tag(chunk, header.tags)
            self._catalog.age(chunk, header.retire_epoch)
            self._catalog.mark(chunk, self.tier, header.lossy)

    def drop_all(self) -> tuple[int, int]:
        """See LowerTier."""
        self._era += 1
        keys = self._catalog.keys(self.tier)
        size = self._catalog.index(self.tier).bytes
        for key in keys:
            self._catalog.leave_below(self.tier, key)
            self._delete_soon(key, self._fingerprint)
        hidden = [key for key in self._foreign if self._is_hidden(key)] if self._hangs else []
        size += sum(self._drop_hidden(key) for key in hidden)
        return len(keys) + len(hidden), size

    def drop(self, key: bytes) -> int | None:
        """See LowerTier."""
        return self._drop_hidden(key) if self._hangs and self._is_hidden(key) else super().drop(key)

    async def give_room(self) -> bool:
        """Give up one chunk for what matters more; whether that could be done."""
        try:
            return await self._evict_one()
        except StorageFull:
            return False

    async def clear(self) -> tuple[int, int]:
        """See LowerTier."""
        removed = self.drop_all()
        await self.settled(DELETING_SECONDS)
        return removed

    async def confirm(self, key: bytes) -> Presence:
        """Nobody else takes anything away."""
        return Presence.THERE

    def _lost(self, key: bytes) -> None:
        # A failing disk may work again, and nobody else has the file.
        pass

    def hides(self, key: bytes) -> bool:
        """See LowerTier: while it hangs."""
        return self._hangs and self._is_hidden(key)

    def _undeleted(self, key: bytes) -> None:
        self._stuck[key] = None

    def _deletes(self, key: bytes) -> None:
        self._deletions.add(key)

    def _has_deleted(self) -> None:
        left = self._deleting.keys() | self._stuck.keys()
        if self._deletions.due or not (left or self._deletions.empty):
            self._deletions.keep(left)

    async def _write(self, chunk: Chunk, parts: Sequence[memoryview], fingerprint: bytes) -> bool:
        if chunk.key in self._stuck and not await self._gone(chunk.key):
            # It may be there because it was spoiled, so it does not count as stored.
            raise StorageFull(f"an older copy of chunk {chunk.key.hex()} cannot be deleted")
        size = self._store.stored_at_most(sum(part.nbytes for part in parts))
        with self._kept(chunk.parent):
            await self._make_room(size)
            try:
                return await self._put(chunk, parts, fingerprint)
            except StorageFull:
                # The file system is fuller than our own limit: give up one chunk, try once more.
                if not await self._evict_one():
                    raise
                return await self._put(chunk, parts, fingerprint)

    async def _room_for(self, chunk: Chunk, size: int) -> None:
        with self._kept(chunk.key):
            await self._make_room(size)

    @contextmanager
    def _kept(self, key: bytes) -> Iterator[None]:
        """Making room for a chunk must not evict the one it continues, nor itself."""
        index = self._catalog.index(self.tier)
        node = index.get(key)
        if node is not None:
            index.block(key)
        try:
            yield
        finally:
            if node is not None and index.get(key) is node:
                index.unblock(key)

    async def _make_room(self, size: int) -> None:
        if size > self._limit:
            raise StorageFull(f"a chunk of {size} bytes is larger than the limit of {self._limit}")
        while (await self._store.inner.capacity()).used + size > self._limit:
            if not await self._evict_one():
                raise StorageFull(f"the limit of {self._limit} bytes is reached and nothing may go")

    async def _evict_one(self) -> bool:
        """Delete something; false when nothing may go, StorageFull when nothing can be deleted now."""
        if self._deleting:
            await self.settled()
            return True
        if self._stuck and await self._gone(next(iter(self._stuck))):
            return True
        if len(self._stuck) >= _MOST_STUCK:
            raise StorageFull(f"{len(self._stuck)} chunks were to make room and cannot be deleted")
        key = self._next_to_go()
        if key is None:
            return False
        if not await self._gone(key):
            raise StorageFull(f"chunk {key.hex()} was to make room and cannot be deleted")
        self.counts["evicted"] += 1
        return True

    def _next_to_go(self) -> bytes | None:
        if self._foreign:
            key = next(iter(self._foreign))
            del self._foreign[key]
            return key
        victim = self._catalog.victim(self.tier)
        if victim is None:
            return None
        self._catalog.leave_below(self.tier, victim.key)
        return victim.key

    async def _gone(self, key: bytes) -> bool:
        """Delete it; whether that worked."""
        self._stuck.pop(key, None)
        self._delete_soon(key, self._fingerprint)
        await self.settled()
        return key not in self._stuck

    @property
    def _hangs(self) -> bool:
        return self._guard is not None and self._guard.hangs

    def _hang_changed(self) -> None:
        if self._hangs:
            # Else every lookup of them would wait for its deadline.
            log.warning("%s tier: %s: nothing of it is used until they have", self.tier.label, self.problem)
            for key in self._catalog.keys(self.tier):
                self._hide(key)
        else:
            log.warning("%s tier: it is used again", self.tier.label)
            self.serve(self._fingerprint)
            for key in list(self._stuck):
                self._stuck.pop(key)
                self._delete_soon(key, self._fingerprint)

    def _is_hidden(self, key: bytes) -> bool:
        found = self._foreign.get(key)
        return found is not None and found[1].fingerprint == self._fingerprint

    def _drop_hidden(self, key: bytes) -> int:
        size, _ = self._foreign.pop(key)
        self._delete_soon(key, self._fingerprint)
        self._catalog.on_gone(key)
        return size

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
                retire_epoch=chunk.epoch or 0,
                lossy=self.tier in chunk.lossy,
            )
            self._foreign[key] = (node.size, header)
        self._catalog.leave_below(self.tier, key)
