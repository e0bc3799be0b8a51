"""A tier below memory, as the agent uses it: fetch, store, clear, and the catalog's books on it.

Wraps an `EnvelopeStore`; never raises to its callers for what a store does wrong: a miss, a
bad chunk and a failing tier are all "not loaded", counted by cause. `own` is a tier that this
agent has to itself and keeps within a limit, `shared` one that belongs to the whole cluster.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, StrEnum, auto
from typing import Final

from kvist_connector.agent.answering import Answering
from kvist_connector.agent.authority import Authority
from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.speed import Speed
from kvist_connector.errors import IntegrityError, StorageFull, TierError
from kvist_connector.protocol.engine import Values
from kvist_connector.protocol.tags import merge_tags
from kvist_connector.protocol.tiers import Tier
from kvist_connector.tiers.coding import Coding, Compression
from kvist_connector.tiers.deadline import LateAnswerError
from kvist_connector.tiers.envelope import EnvelopeStore, ForeignChunk, Header, LockedChunk, LossyChunk

log = logging.getLogger(__name__)
# Others may store a chunk with other tags between our looking at it and storing it.
_RETAGGED_AGAIN: Final = 16


class Stored(StrEnum):
    """What became of a chunk that was to be written; the values are names of counters."""

    WRITTEN = "written"
    PRESENT = "present"  # the tier had it, from another agent or an earlier time
    REFUSED = "refused"  # no room, or the tier fails

    @property
    def there(self) -> bool:
        """Whether the tier has the chunk now."""
        return self is not Stored.REFUSED


class Presence(Enum):
    """Whether a chunk is in a tier."""

    THERE = auto()
    GONE = auto()
    UNKNOWN = auto()  # the tier does not answer


class LowerTier(ABC):
    """One lower tier."""

    def __init__(
        self,
        tier: Tier,
        store: EnvelopeStore,
        catalog: Catalog,
        busy: Busy,
        clock: Callable[[], float],
    ) -> None:
        self.tier = tier
        self._store = store
        self._catalog = catalog
        self._busy = busy
        self._clock = clock
        self._fingerprint = b""
        self._era = 0  # grows when all is dropped: what began before it does not count
        self._deleting: dict[bytes, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()  # the next deletion
        self.authority = Authority()
        self.speed = Speed.of(tier)
        self.counts: Counter[str] = Counter()
        self._answering = Answering(store)

    @property
    def problem(self) -> str:
        """Why the tier cannot be used now; empty while it answers."""
        return self._answering.problem

    @property
    def asking(self) -> bool:
        """Whether it is being found out if the tier answers."""
        return self._answering.asking

    async def asked(self) -> None:
        """Return when more is known; at once while nothing is being found out."""
        await self._answering.asked()

    @property
    def coding(self) -> Coding:
        """How chunks are stored there."""
        return self._store.coding

    def describe(self, values: Values) -> None:
        """What the bytes of the chunks mean that are stored from now on."""
        self._store.describe(values)

    @property
    def closed(self) -> bool:
        """Whether nothing may be read or written now."""
        return False

    @property
    def largest(self) -> int | None:
        """Most bytes of a chunk that the tier can hold; None: no limit of its own."""
        return self._store.largest

    @property
    def room(self) -> int | None:
        """Bytes that fit without evicting; None: no limit of its own."""
        return None

    @abstractmethod
    async def scan(self) -> None:
        """Learn what can be known at start."""

    @abstractmethod
    def serve(self, fingerprint: bytes) -> None:
        """Offer the chunks of this fingerprint and hide all others."""

    @abstractmethod
    async def _write(self, chunk: Chunk, parts: Sequence[memoryview], fingerprint: bytes) -> bool:
        """Put the chunk; false when it was there. Raises StorageFull or TierError."""

    @abstractmethod
    async def _room_for(self, chunk: Chunk, size: int) -> None:
        """A chunk that is here takes `size` bytes more for a while. Raises StorageFull or TierError."""

    @abstractmethod
    def drop_all(self) -> tuple[int, int]:
        """Forget every chunk now and delete the objects in the background; chunks and bytes known of."""

    @abstractmethod
    async def clear(self) -> tuple[int, int]:
        """`drop_all`, and wait for it; chunks and bytes removed. Raises TierError or TimeoutError."""

    @abstractmethod
    async def confirm(self, key: bytes) -> Presence:
        """Whether a chunk that the books say is there really is; when it is gone they are corrected."""

    @abstractmethod
    def _lost(self, key: bytes) -> None:
        """A read failed though the chunk may still be there."""

    def hides(self, key: bytes) -> bool:
        """Whether the chunk is there and cannot be offered now."""
        return False

    def _undeleted(self, key: bytes) -> None:  # noqa: B027 - only a tier with a limit need know
        """An object that was to go is, or may be, still there."""

    def _deletes(self, key: bytes) -> None:  # noqa: B027 - what is not ours need not stay away
        """An object is about to be deleted."""

    def _has_deleted(self) -> None:  # noqa: B027
        """A deletion has ended."""

    async def fetch(self, key: bytes, into: Sequence[memoryview]) -> Header | None:
        """Fill the buffers; None when the chunk could not be had, or was dropped meanwhile."""
        era = self._era
        if self.closed:
            return None
        try:
            with self._busy.hold():
                header = await self._store.get(self._fingerprint, key, into)
        except IntegrityError as error:
            self._answering.worked()
            self._spoiled(key, error)
            return None
        except (TierError, StorageFull) as error:
            self._failed("read_failed", error)
            self._lost(key)
            return None
        self._answering.worked()
        if header is None:
            self.counts["read_missing"] += 1
            self._catalog.leave_below(self.tier, key)
        elif self.authority.retires(key, header.parent, header.index, header.retire_epoch, header.tags):
            self.counts["retired"] += 1
            self._catalog.leave_below(self.tier, key)
            self._delete_soon(key, self._fingerprint)
            return None
        elif (chunk := self._catalog.get(key)) is not None and self.tier in chunk.below:
            self._catalog.mark(chunk, self.tier, header.lossy)
        return header if era == self._era else None

    async def store(self, chunk: Chunk, parts: Sequence[memoryview]) -> Stored:
        """Write the chunk, making room as the tier can."""
        with self._busy.hold():
            fingerprint, era = self._fingerprint, self._era
            deleting = self._deleting.get(chunk.key)
            if deleting is not None:
                await asyncio.wait([deleting])
            if self.closed:
                self.counts["write_refused"] += 1
                return Stored.REFUSED
            try:
                written = await self._write(chunk, parts, fingerprint)
            except StorageFull as error:
                self._answering.worked()
                self._count("write_refused", error)
                return Stored.REFUSED
            except TierError as error:
                self._failed("write_failed", error)
                return Stored.REFUSED
        self._answering.worked()
        if era != self._era or self.authority.retires(
            chunk.key, chunk.parent, chunk.index, chunk.epoch, chunk.tags
        ):
            self._delete_soon(chunk.key, fingerprint)
            return Stored.REFUSED
        if fingerprint == self._fingerprint:
            size = self._store.stored_at_most(sum(part.nbytes for part in parts))
            entered = self._enter(chunk.key, chunk.parent, chunk.index, size)
            rounds = self.coding.compression == "fp8"
            self._catalog.mark(entered, self.tier, rounds or Tier.MEMORY in chunk.lossy)
        return Stored.WRITTEN if written else Stored.PRESENT

    async def header(self, chunk: Chunk) -> Header | None:
        """How a chunk is stored here; None when it is not here any more. Raises TierError."""
        if not self._is_here(chunk):
            return None
        try:
            found = await self._store.header(self._fingerprint, chunk.key)
        except IntegrityError as error:
            self._spoiled(chunk.key, error)
            return None
        except (TierError, StorageFull) as error:
            self._failed("read_failed", error)
            raise TierError(f"{self.tier.label}: {error}") from error
        self._answering.worked()
        return found

    async def recode(
        self, chunk: Chunk, header: Header, parts: Sequence[memoryview], compression: Compression
    ) -> tuple[int, int] | None:
        """Store a chunk that is here as `header` says compressed, or not: its stored bytes before and after.

        None when that changes nothing, or it is not here any more. Raises TierError.
        """
        fingerprint, era = self._fingerprint, self._era
        with self._busy.hold():
            if not self._is_here(chunk):
                return None
            try:
                if compression == "none":
                    await self._room_for(chunk, header.raw_bytes)
                changed = await self._store.rewrite(header, parts, compression)
            except (TierError, StorageFull) as error:
                self._half_written(chunk.key, error)
                raise TierError(f"{self.tier.label}: {error}") from error
        self._answering.worked()
        if self._gone_meanwhile(chunk.key, era, fingerprint):
            return None
        return None if changed is header else (header.stored_bytes, changed.stored_bytes)

    async def retag(self, chunk: Chunk, parts: Sequence[memoryview]) -> bool:
        """A copy that lacks tags of its chunk is stored anew with them; false when that failed.

        Without `parts` it is deleted, and so it is if others change it all the time: what a tag retires must
        be known by it. Tags that agents add at the same time are all kept.
        """
        fingerprint, era = self._fingerprint, self._era
        with self._busy.hold():
            for _ in range(_RETAGGED_AGAIN):
                try:
                    header = await self.header(chunk)
                except TierError:
                    return False
                if header is None or not self._catalog_has_more(chunk, header):
                    return not self.closed
                if not parts:
                    self.drop(chunk.key)
                    return True
                try:
                    if await self._put(chunk, parts, fingerprint, instead=header):
                        self.counts["retagged"] += 1
                        break
                except (TierError, StorageFull) as error:
                    self._half_written(chunk.key, error)
                    return False
            else:
                self.drop(chunk.key)
        self._gone_meanwhile(chunk.key, era, fingerprint)
        return True

    def _catalog_has_more(self, chunk: Chunk, header: Header) -> bool:
        """Whether the chunk has tags that its copy lacks; it has those of the copy afterwards."""
        self._catalog.tag(chunk, header.tags)
        self._catalog.age(chunk, header.retire_epoch)
        return chunk.tags != merge_tags(header.tags, ())

    def _half_written(self, key: bytes, error: Exception) -> None:
        """The old object is, or may be, still there; the new one is not."""
        self._failed("write_failed", error)
        self._catalog.leave_below(self.tier, key)
        self._deletes(key)
        self._undeleted(key)

    def _gone_meanwhile(self, key: bytes, era: int, fingerprint: bytes) -> bool:
        """What was dropped, cleared or retired while it was written anew does not come back by this."""
        if era == self._era and self.tier in self._catalog.tiers_of(key):
            return False
        self._delete_soon(key, fingerprint)
        return True

    def drop(self, key: bytes) -> int | None:
        """Forget one chunk now and delete its object in the background; its bytes, None when not known of."""
        node = self._catalog.index(self.tier).get(key)
        if node is None:
            return None
        self._catalog.leave_below(self.tier, key)
        self._delete_soon(key, self._fingerprint)
        return node.size

    async def settled(self, patience: float | None = None) -> None:
        """Deletions under way are done; TimeoutError when none of them ends for `patience` seconds."""
        while self._deleting:
            async with asyncio.timeout(patience):
                await self._ended.wait()

    async def reopened(self) -> None:
        """Return when it may not be `closed` any more."""
        await self.settled()

    async def close(self) -> None:
        """Deletions end, the store is released."""
        await self._answering.close()
        await self.settled()
        await self._store.inner.close()

    async def _put(
        self,
        chunk: Chunk,
        parts: Sequence[memoryview],
        fingerprint: bytes,
        instead: Header | None = None,
    ) -> bool:
        return await self._store.put_if_absent(
            parts,
            fingerprint=fingerprint,
            key=chunk.key,
            parent=chunk.parent,
            index=chunk.index,
            tags=chunk.tags,
            retire_epoch=chunk.epoch or 0,
            lossy=Tier.MEMORY in chunk.lossy,
            instead=instead,
        )

    def _is_here(self, chunk: Chunk) -> bool:
        known = self._catalog.index(self.tier).get(chunk.key) is not None
        return known and not self.closed and chunk.key not in self._deleting

    def _enter(self, key: bytes, parent: bytes, index: int, size: int) -> Chunk:
        return self._catalog.enter_below(self.tier, key, parent, index, size, self._clock())

    def _spoiled(self, key: bytes, error: IntegrityError) -> None:
        causes = {LockedChunk: "locked", LossyChunk: "lossy", ForeignChunk: "foreign"}
        self._count(causes.get(type(error), "corrupt"), error)
        self._catalog.leave_below(self.tier, key)
        # Others may have use for a shared chunk; what is only ours nobody can read.
        of_others = isinstance(error, LockedChunk | LossyChunk)
        if not of_others or not self._store.inner.capabilities.shared:
            self._delete_soon(key, self._fingerprint)

    def _delete_soon(self, key: bytes, fingerprint: bytes) -> None:
        if key not in self._deleting:
            self._deletes(key)
            task = asyncio.get_running_loop().create_task(self._delete(key, fingerprint))
            self._deleting[key] = task
            task.add_done_callback(lambda _: self._deletion_ended(key))

    def _deletion_ended(self, key: bytes) -> None:
        self._deleting.pop(key, None)
        self._ended.set()
        self._ended = asyncio.Event()
        self._has_deleted()

    async def _delete(self, key: bytes, fingerprint: bytes) -> None:
        try:
            await self._store.delete(fingerprint, key)
        except TierError as error:
            self._failed("delete_failed", error)
            self._undeleted(key)

    def _failed(self, cause: str, error: Exception) -> None:
        if isinstance(error, LateAnswerError):
            self._answering.doubted()
        else:
            self._answering.failed(error)
        self._count(cause, error)

    def _count(self, cause: str, error: Exception) -> None:
        # Logged once per cause: a failing disk must not fill the log as well.
        if not self.counts[cause]:
            log.warning("%s tier: %s: %s (further ones are only counted)", self.tier.label, cause, error)
        self.counts[cause] += 1
