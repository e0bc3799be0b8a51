"""What is cached where: key -> chunk, and per tier the order in which chunks may leave.

State only, no I/O; every method runs on the agent's loop. Watchers hear of each change of
residency (the feed) and of each chunk that left its last tier (the engine). A chunk object
may outlive its entry: readers hold leases on the object, and its slot is given up when the
last lease ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import msgspec

from kvist_connector.eviction import Candidate, EvictionIndex, Learned, policy
from kvist_connector.protocol.engine import SlotRef
from kvist_connector.protocol.tags import EVERY_TAG, merge_tags
from kvist_connector.protocol.tiers import Tier

Watcher = Callable[[Tier, bytes, bool], None]  # tier, key, added (else removed)


class Chunk(msgspec.Struct, eq=False, gc=False):
    """One cached chunk. `ref` is its slot while it is in memory.

    It refers to no object that could refer to it, so the garbage collector need not look at a million.
    """

    key: bytes
    parent: bytes
    index: int
    size: int
    tags: tuple[str, ...] = ()
    ref: SlotRef | None = None
    below: frozenset[Tier] = frozenset()  # one object for all chunks with the same places
    leases: int = 0
    hits: int = 0
    used: float = 0.0
    epoch: int | None = None  # of retirement when it was computed (retired.py); None: its tier knows
    pinned: bool = False
    lossy: frozenset[Tier] = frozenset()  # the places where its values are rounded


@dataclass(slots=True, eq=False)
class Hold:
    """Chunks that are kept together: by leases on `leased`, the ends of their chains.

    No chunk is evicted before its children, so the last one of a prompt keeps those before it. Whoever
    takes a chunk out of memory in any other way makes leases of all of them first.
    """

    chunks: Sequence[Chunk]
    leased: Sequence[Chunk]


class Catalog:
    """All chunks of one agent."""

    def __init__(
        self,
        rule: Literal["lru", "cost"],
        lower: Iterable[Tier] = (),
        learned: Mapping[Tier, Learned] = MappingProxyType({}),
    ) -> None:
        self._chunks: dict[bytes, Chunk] = {}
        self._tagged: dict[str, set[bytes]] = {}
        self._tiers = {tier: EvictionIndex(policy(rule, learned.get(tier))) for tier in (Tier.MEMORY, *lower)}
        self._known_places: dict[frozenset[Tier], frozenset[Tier]] = {}
        self._holds: set[Hold] = set()  # whose inner chunks have no lease of their own
        self._weigh: Callable[[Chunk, Tier], float] = lambda chunk, tier: 1.0
        self.is_pinned: Callable[[bytes], bool] = lambda key: False  # whether a chunk comes in pinned
        self.settle: Callable[[], None] = lambda: None  # enters uses that wait, before the order matters
        self.on_change: Watcher = lambda tier, key, added: None
        self.on_gone: Callable[[bytes], None] = lambda key: None

    def __len__(self) -> int:
        return len(self._chunks)

    def weigh_by(self, weigh: Callable[[Chunk, Tier], float]) -> None:
        """Seconds that a hit on a chunk in a tier saves; asked when it enters a tier."""
        self._weigh = weigh

    def get(self, key: bytes) -> Chunk | None:
        """The chunk in any tier."""
        return self._chunks.get(key)

    def resident(self, key: bytes) -> Chunk | None:
        """The chunk if it is in memory."""
        chunk = self._chunks.get(key)
        return chunk if chunk is not None and chunk.ref is not None else None

    def leading(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Leading chunks that are in memory."""
        found = []
        for chunk in map(self._chunks.get, keys):
            if chunk is None or chunk.ref is None:
                break
            found.append(chunk)
        return found

    def parent_of(self, key: bytes) -> bytes | None:
        """The chunk before one that is known here."""
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.parent

    def tiers_of(self, key: bytes) -> list[Tier]:
        """Where the chunk is, preferred first."""
        return [tier for tier, index in self._tiers.items() if key in index]

    def known(self, keys: Iterable[bytes]) -> int:
        """Leading chunks held in any tier."""
        count = 0
        for key in keys:
            if key not in self._chunks:
                break
            count += 1
        return count

    def keys(self, tier: Tier) -> list[bytes]:
        """Every key of a tier."""
        return self._tiers[tier].keys()

    def chunks(self) -> Iterable[Chunk]:
        """Every chunk, in no order."""
        return self._chunks.values()

    def tagged(self, tag: str) -> list[bytes]:
        """Keys of the chunks that carry the tag, or more tags than are kept apart."""
        return list(self._tagged.get(tag, set()) | self._tagged.get(EVERY_TAG, set()))

    def count(self, tag: str) -> int:
        """Chunks that carry this very tag."""
        return len(self._tagged.get(tag, ()))

    def with_tag(self, tag: str) -> list[bytes]:
        """Keys of the chunks that carry this very tag."""
        return list(self._tagged.get(tag, ()))

    def tag(self, chunk: Chunk, tags: Iterable[str]) -> bool:
        """Add tags to a chunk; whether that changed anything."""
        merged = merge_tags(chunk.tags, tags)
        if merged == chunk.tags:
            return False
        if self._chunks.get(chunk.key) is not chunk:
            chunk.tags = merged
            return True
        self._untag(chunk)
        chunk.tags = merged
        for tag in merged:
            self._tagged.setdefault(tag, set()).add(chunk.key)
        return True

    def age(self, chunk: Chunk, epoch: int) -> None:
        """A copy of the chunk was computed at this epoch; the oldest copy counts."""
        chunk.epoch = epoch if chunk.epoch is None else min(chunk.epoch, epoch)

    def mark(self, chunk: Chunk, tier: Tier, lossy: bool) -> None:
        """Whether the copy in this tier has rounded values."""
        chunk.lossy = self._places(chunk.lossy | {tier} if lossy else chunk.lossy - {tier})

    def pin(self, chunk: Chunk) -> None:
        """Keep the chunk from eviction in every tier it is in or enters; pinning twice is nothing."""
        if not chunk.pinned:
            chunk.pinned = True
            self._each_place(chunk, EvictionIndex.block)

    def unpin(self, chunk: Chunk) -> None:
        """Let it be evicted again; a chunk that is not pinned is nothing."""
        if chunk.pinned:
            chunk.pinned = False
            self._each_place(chunk, EvictionIndex.unblock)

    def index(self, tier: Tier) -> EvictionIndex:
        """The eviction order of a tier, for counts."""
        return self._tiers[tier]

    def order(self, tier: Tier) -> EvictionIndex:
        """The same for the worth of chunks: every use until now is in it."""
        self.settle()
        return self._tiers[tier]

    @property
    def lower(self) -> list[Tier]:
        """The tiers below memory."""
        return [tier for tier in self._tiers if tier != Tier.MEMORY]

    def enter_memory(
        self, key: bytes, parent: bytes, index: int, size: int, ref: SlotRef, now: float
    ) -> Chunk:
        """A slot was committed under the key."""
        chunk = self._entry(key, parent, index, size)
        if chunk.ref is not None:
            raise ValueError(f"chunk {key.hex()} is already in memory")
        chunk.ref = ref
        chunk.parent = self._same(parent)  # a chunk found in a shared tier did not say what its root is
        chunk.used = now
        self._add(Tier.MEMORY, chunk, size, now)
        self.on_change(Tier.MEMORY, key, True)
        return chunk

    def enter_below(self, tier: Tier, key: bytes, parent: bytes, index: int, size: int, now: float) -> Chunk:
        """A lower tier holds the chunk now."""
        chunk = self._entry(key, parent, index, size)
        if tier not in chunk.below:
            chunk.below = self._places(chunk.below | {tier})
            self._add(tier, chunk, size, now, self._same(parent))
            self.on_change(tier, key, True)
            if chunk.ref is not None:
                # Dropping it from memory costs only the reload from now on.
                self._tiers[Tier.MEMORY].weigh(key, self._weigh(chunk, Tier.MEMORY))
        return chunk

    def leave_memory(self, chunk: Chunk) -> SlotRef | None:
        """Take the chunk out of memory; its slot, or None when leases keep the slot alive."""
        ref = chunk.ref
        if ref is None:
            raise ValueError(f"chunk {chunk.key.hex()} is not in memory")
        if chunk.key in self._tiers[Tier.MEMORY]:  # else it is a victim: nothing that is kept
            self._lease_each()
            self._tiers[Tier.MEMORY].remove(chunk.key)
        if chunk.leases:
            self._detach(chunk)
        else:
            chunk.ref = None
            self.mark(chunk, Tier.MEMORY, False)
        self._left(chunk, Tier.MEMORY)
        return None if chunk.leases else ref

    def leave_below(self, tier: Tier, key: bytes) -> None:
        """A lower tier lost or dropped the chunk; unknown keys are nothing."""
        chunk = self._chunks.get(key)
        if chunk is None or tier not in chunk.below:
            return
        chunk.below = self._places(chunk.below - {tier})
        self.mark(chunk, tier, False)
        if key in self._tiers[tier]:
            self._tiers[tier].remove(key)
        if chunk.ref is not None:
            self._tiers[Tier.MEMORY].weigh(key, self._weigh(chunk, Tier.MEMORY))
        self._left(chunk, tier)

    def lease(self, chunk: Chunk) -> None:
        """Keep the chunk's slot until as many `unlease`."""
        if chunk.ref is None:
            raise ValueError(f"chunk {chunk.key.hex()} is not in memory")
        chunk.leases += 1
        if self._attached(chunk):
            self._tiers[Tier.MEMORY].block(chunk.key)

    def unlease(self, chunk: Chunk) -> SlotRef | None:
        """End one lease; returns the slot to free when the chunk had left the catalog meanwhile."""
        if chunk.leases <= 0:
            raise ValueError(f"chunk {chunk.key.hex()} is not leased")
        chunk.leases -= 1
        if self._attached(chunk):
            self._tiers[Tier.MEMORY].unblock(chunk.key)
            return None
        if chunk.leases:
            return None
        ref, chunk.ref = chunk.ref, None
        return ref

    def hold(self, chunks: Sequence[Chunk]) -> Hold:
        """Keep the slots of these chunks, as long as `ended` has not been called and its leases ended."""
        leased = [chunk for chunk, after in pairwise(chunks) if after.parent != chunk.key]
        leased += chunks[-1:]
        for chunk in leased:
            self.lease(chunk)
        hold = Hold(chunks, leased)
        if len(leased) < len(chunks):
            self._holds.add(hold)
        return hold

    def ended(self, hold: Hold) -> Sequence[Chunk]:
        """The hold is over; the chunks whose leases its owner has to end now."""
        self._holds.discard(hold)
        return hold.leased

    def is_leased(self, chunk: Chunk) -> bool:
        """Whether anybody needs its slot."""
        self._lease_each()
        return chunk.leases > 0

    def touch(self, chunk: Chunk, now: float) -> None:
        """The chunk was hit."""
        chunk.hits += 1
        chunk.used = now
        for tier in (Tier.MEMORY, *chunk.below):
            if chunk.key in self._tiers[tier]:
                self._tiers[tier].touch(chunk.key, now)

    def prompt_ended(self, key: bytes) -> None:
        """What is stored after the chunk, the prompt's last, is of the answer."""
        for tier in self._tiers:
            self.order(tier).answer(key)

    def answer_ended(self, key: bytes, tokens: int) -> None:
        """So many were decoded after the prompt that ends with the chunk."""
        for tier in self._tiers:
            self.order(tier).answer(key, tokens)

    def learned(self) -> dict[Tier, Learned]:
        """What the tiers' eviction has learned, for the next agent."""
        found = {tier: index.learned() for tier, index in self._tiers.items()}
        return {tier: learned for tier, learned in found.items() if learned is not None}

    def victim(self, tier: Tier) -> Chunk | None:
        """The chunk that should leave the tier; it has left its eviction order, the caller finishes."""
        candidate: Candidate | None = self.order(tier).pop()
        return None if candidate is None else self._chunks[candidate.key]

    def next_victim(self, tier: Tier) -> Chunk | None:
        """The chunk that should leave the tier next; it is still there."""
        candidate = self.order(tier).next()
        return None if candidate is None else self._chunks[candidate.key]

    def may_leave(self, tier: Tier, chunk: Chunk) -> bool:
        """Whether a chunk that is there is in nobody's use, not pinned, and without children there."""
        self._lease_each()
        return self._tiers[tier].may_leave(chunk.key)

    def check_integrity(self) -> None:
        """Raises AssertionError when chunks, tiers and leases disagree."""
        for index in self._tiers.values():
            index.check_integrity()
        slots: set[int] = set()
        for key, chunk in self._chunks.items():
            assert chunk.key == key, "a chunk is under a foreign key"
            assert chunk.ref is not None or chunk.below, "a chunk without a place is in the catalog"
            assert (chunk.ref is not None) == (key in self._tiers[Tier.MEMORY]), "memory tier drifted"
            for tier in self.lower:
                assert (tier in chunk.below) == (key in self._tiers[tier]), f"{tier.label} tier drifted"
            if chunk.ref is not None:
                assert chunk.ref.slot not in slots, "two chunks share a slot"
                slots.add(chunk.ref.slot)
            node = self._tiers[Tier.MEMORY].get(key)
            held = chunk.leases + chunk.pinned if node else 0
            assert (node.blocked if node else 0) == held, "leases, pins and blocks differ"
            assert all(key in self._tagged[tag] for tag in chunk.tags), "tags drifted"
        assert sum(map(len, self._tagged.values())) == sum(len(c.tags) for c in self._chunks.values()), (
            "a chunk that is gone is still listed by tag"
        )

    def _places(self, tiers: frozenset[Tier]) -> frozenset[Tier]:
        return self._known_places.setdefault(tiers, tiers)

    def _lease_each(self) -> None:
        """From now on every chunk that is kept has a lease."""
        for hold in self._holds:
            for chunk, after in pairwise(hold.chunks):
                if after.parent == chunk.key:
                    self.lease(chunk)
            hold.leased = hold.chunks
        self._holds.clear()

    def _attached(self, chunk: Chunk) -> bool:
        return self._chunks.get(chunk.key) is chunk and chunk.key in self._tiers[Tier.MEMORY]

    def _entry(self, key: bytes, parent: bytes, index: int, size: int) -> Chunk:
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = Chunk(key, self._same(parent), index, size, pinned=self.is_pinned(key))
            self._chunks[key] = chunk
        return chunk

    def _same(self, parent: bytes) -> bytes:
        """The parent's own key object where it is known: chains are followed without a second copy."""
        before = self._chunks.get(parent)
        return parent if before is None else before.key

    def _detach(self, chunk: Chunk) -> None:
        # The leased object keeps the slot; the catalog goes on with a new object, if with any.
        self._remove(chunk)
        if chunk.below:
            heir = Chunk(chunk.key, chunk.parent, chunk.index, chunk.size)
            heir.below, chunk.below = chunk.below, frozenset()
            heir.epoch, heir.pinned, chunk.pinned = chunk.epoch, chunk.pinned, False
            heir.lossy = self._places(chunk.lossy - {Tier.MEMORY})
            self._chunks[chunk.key] = heir
            self.tag(heir, chunk.tags)

    def _left(self, chunk: Chunk, tier: Tier) -> None:
        self.on_change(tier, chunk.key, False)
        current = self._chunks.get(chunk.key)
        if current is None:
            self.on_gone(chunk.key)
        elif current.ref is None and not current.below:
            self._remove(current)
            self.on_gone(chunk.key)

    def _remove(self, chunk: Chunk) -> None:
        del self._chunks[chunk.key]
        self._untag(chunk)

    def _untag(self, chunk: Chunk) -> None:
        for tag in chunk.tags:
            keys = self._tagged.get(tag, set())
            keys.discard(chunk.key)
            if not keys:
                self._tagged.pop(tag, None)

    def _add(self, tier: Tier, chunk: Chunk, size: int, now: float, parent: bytes | None = None) -> None:
        index = self.order(tier)
        index.add(chunk.key, chunk.parent if parent is None else parent, size, self._weigh(chunk, tier), now)
        if chunk.pinned:
            index.block(chunk.key)

    def _each_place(self, chunk: Chunk, change: Callable[[EvictionIndex, bytes], None]) -> None:
        for tier in (Tier.MEMORY, *chunk.below):
            if chunk.key in self._tiers[tier]:
                change(self._tiers[tier], chunk.key)
