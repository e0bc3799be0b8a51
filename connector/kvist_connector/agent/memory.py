"""The memory tier: arena, slots, journal and the memory side of the catalog, kept in step.

Runs on the agent's loop. The one place where a slot changes hands: whoever wants a slot
asks `allocate`, whoever has one ends with `commit`, `discard` or `quarantine`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from kvist_connector.agent.arena_file import ArenaFile
from kvist_connector.agent.authority import Authority
from kvist_connector.agent.catalog import Catalog, Chunk, Hold
from kvist_connector.agent.journal import Entry, Journal
from kvist_connector.agent.layouts import geometry_of
from kvist_connector.agent.slots import SlotTable
from kvist_connector.arena.geometry import chunk_bytes, slot_bytes, slot_offset
from kvist_connector.arena.headers import State
from kvist_connector.errors import ConfigError
from kvist_connector.protocol.engine import Geometry, Layout, SlotRef
from kvist_connector.protocol.tags import merge_tags
from kvist_connector.protocol.tiers import Tier

# The newest chunks stay for a while whatever the policy thinks of them: a request that is still
# being computed goes on from its last chunk, and a chunk without hits looks worthless to any policy.
_FRESH_SHARE = 8
# Generations start at epoch * 2**20: above all that an earlier agent can have given out.
_EPOCH_SHIFT = 20


class MemoryTier:
    """Slots of one layout. Without a layout, or with an arena of no bytes, it holds nothing."""

    def __init__(
        self, arena: ArenaFile | None, journal: Journal, catalog: Catalog, clock: Callable[[], float]
    ):
        self._arena = arena
        self._journal = journal
        self._catalog = catalog
        self._clock = clock
        self._slots: SlotTable | None = None
        self.authority = Authority()
        # A chunk has tags which the copies of it in lower tiers may lack.
        self.on_late_tags: Callable[[bytes], None] = lambda key: None
        self._fresh: deque[Chunk] = deque()  # each under one lease of ours
        # Whether chunks that an earlier agent kept under a layout are still wanted.
        self.keeps: Callable[[Layout], bool] = lambda layout: True
        self.on_evicted: Callable[[Chunk], None] = lambda chunk: None  # about to be dropped for room
        self.geometry: Geometry | None = None
        self.layout: Layout | None = None

    @property
    def enabled(self) -> bool:
        """Whether there is an arena at all."""
        return self._arena is not None

    @property
    def size(self) -> int:
        """Bytes of the arena."""
        return self._arena.size if self._arena is not None else 0

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk over all ranks; 0 until a layout is known."""
        return chunk_bytes(self.geometry) if self.geometry is not None else 0

    @property
    def slots(self) -> SlotTable | None:
        """The slot table, for acknowledgements and counts."""
        return self._slots

    def previous_epoch(self) -> int:
        """Epoch of the agent that used this arena before; 0 when none did."""
        found = self._arena.existing() if self._arena is not None else None
        return found[2] if found else 0

    def resume(self, epoch: int, members: Iterable[str]) -> int:
        """Keep what an earlier agent committed; the number of chunks kept."""
        found = self._arena.existing() if self._arena is not None else None
        if self._arena is None or found is None:
            return 0
        geometry, fingerprint, _ = found
        layout, entries = self._journal.read()
        if layout is None or not self.keeps(layout):
            return 0
        if layout.fingerprint != fingerprint or geometry != geometry_of(layout, self.size):
            return 0
        self.layout, self.geometry = layout, geometry
        self.authority.revision = layout.description.get("revision", "")
        self._slots = SlotTable.resume(self._arena.headers(geometry), members)
        self._arena.seal(geometry, fingerprint, epoch)
        kept = self._readmit(self._slots, entries)
        self._journal.rewrite(layout, kept)
        return len(kept)

    def format(self, layout: Layout, epoch: int) -> None:
        """Start empty under a new layout; no worker may have the arena mapped. Raises ConfigError."""
        self.forget()
        self.layout = layout
        self.geometry = geometry_of(layout, self.size)
        if self._arena is None:
            return
        self._arena.erase(self.geometry)
        self._slots = SlotTable.fresh(self._arena.headers(self.geometry), epoch << _EPOCH_SHIFT)
        try:
            self._journal.rewrite(layout, ())
        except ConfigError:
            self.layout = self.geometry = self._slots = None
            raise
        self._arena.seal(self.geometry, layout.fingerprint, epoch)

    @property
    def fresh(self) -> int:
        """Chunks that are kept because they are new."""
        return len(self._fresh)

    def settle_fresh(self, keep: int = 0) -> None:
        """Let all but the newest `keep` chunks compete for their place."""
        while len(self._fresh) > keep:
            self.unlease(self._fresh.popleft())

    def forget(self) -> None:
        """Drop every chunk; leased ones leave the catalog now and their slots with the last lease."""
        self.settle_fresh()
        for key in self._catalog.keys(Tier.MEMORY):
            chunk = self._catalog.resident(key)
            if chunk is not None:
                self.drop(chunk)

    def allocate(self, count: int) -> list[SlotRef] | None:
        """All of `count` slots or None, evicting as needed."""
        refs = self.allocate_up_to(count)
        while len(refs) < count and self._fresh:
            self.settle_fresh(len(self._fresh) - 1)
            refs += self.allocate_up_to(count - len(refs))
        if len(refs) == count:
            return refs
        for ref in refs:
            self.discard(ref)
        return None

    def allocate_up_to(self, count: int) -> list[SlotRef]:
        """At most `count` slots, evicting what is neither leased nor has children."""
        refs: list[SlotRef] = []
        if self._slots is None:
            return refs
        while len(refs) < count:
            ref = self._slots.reserve()
            if ref is not None:
                refs.append(ref)
            elif not self._evict_one():
                break
        return refs

    def owns(self, ref: SlotRef) -> bool:
        """Whether the reference is a reserved slot of the present layout."""
        return self._slots is not None and self._slots.holds(ref, State.RESERVED)

    def commit(
        self,
        ref: SlotRef,
        key: bytes,
        parent: bytes,
        index: int,
        tags: tuple[str, ...] = (),
        epoch: int = 0,
        lossy: bool = False,
        loaded: bool = False,
    ) -> Chunk:
        """A filled slot becomes a cached chunk; the key must not be in memory yet. `loaded`: with the tags
        of a copy in a lower tier."""
        slots = self._table()
        known = self._catalog.get(key)
        before = known.tags if known is not None else ()
        stored = merge_tags(tags, ()) if loaded else before
        tags = merge_tags(before, tags)
        self._journal.append(Entry(ref, key, parent, index, tags, epoch, lossy))
        slots.commit(ref, key, index)
        chunk = self._catalog.enter_memory(key, parent, index, self.chunk_bytes, ref, self._clock())
        self._catalog.tag(chunk, tags)
        self._catalog.age(chunk, epoch)
        self._catalog.mark(chunk, Tier.MEMORY, lossy)
        if tags != stored:
            self.on_late_tags(key)
        self.lease(chunk)
        self._fresh.append(chunk)
        self.settle_fresh(max(1, slots.size // _FRESH_SHARE))
        if self._journal.due(len(self._catalog)):
            self._journal.compact(self._entries())
        return chunk

    def tag(self, chunk: Chunk, tags: tuple[str, ...]) -> None:
        """Another request with these tags uses the chunk, too."""
        if self._catalog.tag(chunk, tags) and chunk.ref is not None:
            self._journal.append(_entry(chunk, chunk.ref))
            self.on_late_tags(chunk.key)

    def drop(self, chunk: Chunk) -> None:
        """Take a chunk out of memory; its slot follows when the last lease ends."""
        ref = self._catalog.leave_memory(chunk)
        if ref is not None:
            self._table().free(ref)

    def lease(self, chunk: Chunk) -> None:
        """Keep the chunk's slot."""
        self._catalog.lease(chunk)

    def unlease(self, chunk: Chunk) -> None:
        """End one lease."""
        ref = self._catalog.unlease(chunk)
        if ref is not None and self._slots is not None and self._slots.holds(ref, State.COMMITTED):
            self._slots.free(ref)

    def hold(self, chunks: Sequence[Chunk]) -> Hold:
        """Keep the slots of all of them, until `let_go`."""
        return self._catalog.hold(chunks)

    def let_go(self, hold: Hold) -> None:
        """Once, exactly."""
        for chunk in self._catalog.ended(hold):
            self.unlease(chunk)

    def discard(self, ref: SlotRef) -> None:
        """A reserved slot comes back, no copy into it runs."""
        if self.owns(ref):
            self._table().discard(ref)

    def quarantine(self, refs: Iterable[SlotRef], members: Iterable[str]) -> None:
        """Reserved slots whose owner vanished."""
        if self._slots is not None:
            self._slots.quarantine([ref for ref in refs if self.owns(ref)], members)

    def views(self, ref: SlotRef) -> list[memoryview]:
        """The slot's bytes, one view a rank."""
        if self._arena is None or self.geometry is None:
            raise ValueError("there is no arena")
        return self._arena.chunk_views(self.geometry, ref.slot)

    @contextmanager
    def held(self, chunk: Chunk) -> Iterator[list[memoryview]]:
        """`views` of a chunk that is here; its slot is nobody else's meanwhile."""
        if chunk.ref is None:
            raise ValueError(f"chunk {chunk.key.hex()} is not in memory")
        self.lease(chunk)
        try:
            yield self.views(chunk.ref)
        finally:
            self.unlease(chunk)

    def reader(self) -> BinaryIO:
        """The arena's file, to be closed by whoever asked."""
        if self._arena is None:
            raise ValueError("there is no arena")
        return self._arena.reader()

    def spans(self, ref: SlotRef) -> list[tuple[int, int]]:
        """Where the slot's bytes are in the arena's file: offset and length, one a rank."""
        if self.geometry is None:
            raise ValueError("there is no arena")
        length = slot_bytes(self.geometry)
        return [(slot_offset(self.geometry, rank, ref.slot), length) for rank in range(self.geometry.ranks)]

    def check_integrity(self) -> None:
        """Raises AssertionError when slots and catalog disagree."""
        self._catalog.check_integrity()
        if self._slots is not None:
            self._slots.check_integrity()
            committed = {ref.slot: header.key for ref, header in self._slots.committed()}
            for key in self._catalog.keys(Tier.MEMORY):
                chunk = self._catalog.resident(key)
                assert chunk is not None, "a listed chunk is gone"
                assert chunk.ref is not None, "a listed chunk has no slot"
                assert committed.get(chunk.ref.slot) == key, "a chunk's slot holds something else"

    def close(self) -> None:
        """Journal and lock are released; the arena file stays."""
        self._journal.close()

    def _table(self) -> SlotTable:
        if self._slots is None:
            raise ValueError("there is no memory tier")
        return self._slots

    def _evict_one(self) -> bool:
        victim = self._catalog.victim(Tier.MEMORY)
        if victim is None:
            return False
        self.on_evicted(victim)
        self.drop(victim)
        return True

    def _readmit(self, slots: SlotTable, entries: dict[bytes, Entry]) -> list[Entry]:
        kept: dict[bytes, Entry] = {}
        parents = {entry.key: entry.parent for entry in entries.values()}
        for ref, header in list(slots.committed()):
            entry = entries.get(header.key)
            if entry is None or entry.ref != ref or header.key in kept or self._is_retired(entry, parents):
                slots.free(ref)
                continue
            kept[header.key] = entry
        for entry in sorted(kept.values(), key=lambda found: found.index):
            chunk = self._catalog.enter_memory(
                entry.key, entry.parent, entry.index, self.chunk_bytes, entry.ref, self._clock()
            )
            self._catalog.tag(chunk, entry.tags)
            self._catalog.age(chunk, entry.epoch)
            self._catalog.mark(chunk, Tier.MEMORY, entry.lossy)
        return list(kept.values())

    def _entries(self) -> list[Entry]:
        return [_entry(chunk, chunk.ref) for chunk in self._catalog.chunks() if chunk.ref is not None]

    def _is_retired(self, entry: Entry, parents: dict[bytes, bytes]) -> bool:
        return self.authority.retires(entry.key, entry.parent, entry.index, entry.epoch, entry.tags, parents)


def _entry(chunk: Chunk, ref: SlotRef) -> Entry:
    lossy = Tier.MEMORY in chunk.lossy
    return Entry(ref, chunk.key, chunk.parent, chunk.index, chunk.tags, chunk.epoch or 0, lossy)
