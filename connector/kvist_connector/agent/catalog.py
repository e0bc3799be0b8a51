"""What is cached where: key -> chunk, and per tier the order in which chunks may leave.

State only, no I/O; every method runs on the agent's loop. Watchers hear of each change of
residency (the feed) and of each chunk that left its last tier (the engine). A chunk object
may outlive its entry: readers hold leases on the object, and its slot is given up when the
last lease ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvist_connector.eviction import Candidate, EvictionIndex, policy
from kvist_connector.protocol.engine import SlotRef
from kvist_connector.protocol.tiers import Tier

Watcher = Callable[[Tier, bytes, bool], None]  # tier, key, added (else removed)


@dataclass(slots=True, eq=False)
class Chunk:
    """One cached chunk. `ref` is its slot while it is in memory."""

    key: bytes
    parent: bytes
    index: int
    size: int
    tags: tuple[str, ...] = ()
    ref: SlotRef | None = None
    below: set[Tier] = field(default_factory=set)
    leases: int = 0
    hits: int = 0
    used: float = 0.0


class Catalog:
    """All chunks of one agent."""

    def __init__(self, rule: Literal["lru", "cost"], lower: Iterable[Tier] = ()) -> None:
        self._chunks: dict[bytes, Chunk] = {}
        self._tiers = {tier: EvictionIndex(policy(rule)) for tier in (Tier.MEMORY, *lower)}
        self._weigh: Callable[[Chunk, Tier], float] = lambda chunk, tier: 1.0
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

    def index(self, tier: Tier) -> EvictionIndex:
        """The eviction order of a tier, for counts."""
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
        chunk.parent = parent  # a chunk found in a shared tier did not say what its root is
        chunk.used = now
        self._tiers[Tier.MEMORY].add(key, parent, size, self._weigh(chunk, Tier.MEMORY), now)
        self.on_change(Tier.MEMORY, key, True)
        return chunk

    def enter_below(self, tier: Tier, key: bytes, parent: bytes, index: int, size: int, now: float) -> Chunk:
        """A lower tier holds the chunk now."""
        chunk = self._entry(key, parent, index, size)
        if tier not in chunk.below:
            chunk.below.add(tier)
            self._tiers[tier].add(key, parent, size, self._weigh(chunk, tier), now)
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
        if chunk.key in self._tiers[Tier.MEMORY]:
            self._tiers[Tier.MEMORY].remove(chunk.key)
        if chunk.leases:
            self._detach(chunk)
        else:
            chunk.ref = None
        self._left(chunk, Tier.MEMORY)
        return None if chunk.leases else ref

    def leave_below(self, tier: Tier, key: bytes) -> None:
        """A lower tier lost or dropped the chunk; unknown keys are nothing."""
        chunk = self._chunks.get(key)
        if chunk is None or tier not in chunk.below:
            return
        chunk.below.discard(tier)
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

    def touch(self, chunk: Chunk, now: float) -> None:
        """The chunk was hit."""
        chunk.hits += 1
        chunk.used = now
        for tier in (Tier.MEMORY, *chunk.below):
            if chunk.key in self._tiers[tier]:
                self._tiers[tier].touch(chunk.key, now)

    def victim(self, tier: Tier) -> Chunk | None:
        """The chunk that should leave the tier; it has left its eviction order, the caller finishes."""
        candidate: Candidate | None = self._tiers[tier].pop()
        return None if candidate is None else self._chunks[candidate.key]

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
            assert (node.blocked if node else 0) == chunk.leases, "leases and blocks differ"

    def _attached(self, chunk: Chunk) -> bool:
        return self._chunks.get(chunk.key) is chunk and chunk.key in self._tiers[Tier.MEMORY]

    def _entry(self, key: bytes, parent: bytes, index: int, size: int) -> Chunk:
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = Chunk(key, parent, index, size)
        return chunk

    def _detach(self, chunk: Chunk) -> None:
        # The leased object keeps the slot; the catalog goes on with a new object, if with any.
        del self._chunks[chunk.key]
        if chunk.below:
            heir = Chunk(chunk.key, chunk.parent, chunk.index, chunk.size, chunk.tags)
            heir.below, chunk.below = chunk.below, set()
            self._chunks[chunk.key] = heir

    def _left(self, chunk: Chunk, tier: Tier) -> None:
        self.on_change(tier, chunk.key, False)
        current = self._chunks.get(chunk.key)
        if current is None:
            self.on_gone(chunk.key)
        elif current.ref is None and not current.below:
            del self._chunks[chunk.key]
            self.on_gone(chunk.key)
