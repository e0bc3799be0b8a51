"""What leaves a full tier first. Torch-free, no I/O, no clock; also used by the sizing tools.

`EvictionIndex` holds one tier's chunks and keeps the two promises every policy gets for free:
no chunk goes before its children, a blocked one (leased, pinned, being copied) never goes.
A `Policy` only puts a number on a chunk. All calls are O(log n) amortised: one heap of
leaves, entries corrected when they are popped instead of when they change.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(slots=True, eq=False)
class Candidate:
    """One chunk of the tier, as the policy sees it."""

    key: bytes
    parent: bytes
    size: int  # bytes
    weight: float  # seconds a hit saves: recompute, or recompute less reload where it is stored below too
    used: float  # time of the last use, any monotonic unit
    hits: int = 1
    blocked: int = 0
    priority: float = 0.0
    serial: int = -1  # of its valid heap entry; -1: none


class Policy(Protocol):
    """Smallest priority leaves first. A policy belongs to one index."""

    def priority(self, candidate: Candidate) -> float:
        """Called when the candidate is added, used or changes weight."""

    def evicted(self, candidate: Candidate) -> None:
        """Called when the candidate was chosen."""


class Lru:
    """Least recently used."""

    def priority(self, candidate: Candidate) -> float:
        """The time of last use."""
        return candidate.used

    def evicted(self, candidate: Candidate) -> None:
        """Nothing to learn."""


class CostAware:
    """Seconds saved x uses / bytes, aged: GreedyDual-Size-Frequency.

    priority = age + hits * weight / size, and age rises to the priority of each chunk
    evicted, so a once popular chunk sinks relative to new ones without any clock
    (Cherkasova, HPL-98-69R1). Size counts in MiB to keep the numbers readable.
    """

    def __init__(self) -> None:
        self._age = 0.0

    def priority(self, candidate: Candidate) -> float:
        """Value of keeping the chunk, on top of the present age."""
        return self._age + candidate.hits * candidate.weight * 2**20 / max(candidate.size, 1)

    def evicted(self, candidate: Candidate) -> None:
        """Time passes when something had to go."""
        self._age = max(self._age, candidate.priority)


def policy(name: Literal["lru", "cost"]) -> Policy:
    """A fresh policy by its name in the settings."""
    return Lru() if name == "lru" else CostAware()


class EvictionIndex:
    """Chunks of one tier and the order in which they may leave."""

    def __init__(self, rule: Policy) -> None:
        self._rule = rule
        self._nodes: dict[bytes, Candidate] = {}
        self._children: dict[bytes, int] = {}  # by parent key, whether or not the parent is in the tier
        self._heap: list[tuple[float, int, Candidate]] = []
        self._serial = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def get(self, key: bytes) -> Candidate | None:
        """The candidate, for reading."""
        return self._nodes.get(key)

    def keys(self) -> list[bytes]:
        """Every key of the tier, those of parents not necessarily before their children's."""
        return list(self._nodes)

    def add(self, key: bytes, parent: bytes, size: int, weight: float, now: float) -> None:
        """A chunk enters the tier; adding it twice is an error of the caller."""
        if key in self._nodes:
            raise ValueError(f"chunk {key.hex()} is already in this tier")
        node = Candidate(key, parent, size, weight, now)
        self._nodes[key] = node
        self._children[parent] = self._children.get(parent, 0) + 1
        self.bytes += size
        node.priority = self._rule.priority(node)
        self._offer(node)

    def remove(self, key: bytes) -> None:
        """A chunk leaves the tier for any reason."""
        node = self._nodes.pop(key)
        node.serial = -1
        self.bytes -= node.size
        left = self._children[node.parent] - 1
        if left:
            self._children[node.parent] = left
        else:
            del self._children[node.parent]
            parent = self._nodes.get(node.parent)
            if parent is not None:
                self._offer(parent)
        self._compact()

    def touch(self, key: bytes, now: float) -> None:
        """The chunk was used. Its heap entry is corrected when popped: values only grow here."""
        node = self._nodes[key]
        node.used = now
        node.hits += 1
        node.priority = self._rule.priority(node)

    def weigh(self, key: bytes, weight: float) -> None:
        """A hit on the chunk is worth another number of seconds now."""
        node = self._nodes[key]
        before = node.priority
        node.weight = weight
        node.priority = self._rule.priority(node)
        if node.priority < before and node.serial >= 0:
            node.serial = -1
            self._offer(node)
            self._compact()

    def block(self, key: bytes) -> None:
        """Not to be evicted until as many unblocks."""
        self._nodes[key].blocked += 1

    def unblock(self, key: bytes) -> None:
        """Undo one block."""
        node = self._nodes[key]
        if node.blocked <= 0:
            raise ValueError(f"chunk {key.hex()} is not blocked")
        node.blocked -= 1
        self._offer(node)

    def pop(self) -> Candidate | None:
        """Remove and return the chunk to evict; None when everything left is blocked."""
        while self._heap:
            priority, serial, node = heapq.heappop(self._heap)
            if node.serial != serial:
                continue
            node.serial = -1
            if not self._evictable(node):
                continue
            if node.priority > priority:
                self._offer(node)
                continue
            self._rule.evicted(node)
            self.remove(node.key)
            return node
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree; for tests and the integrity endpoint."""
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            children[node.parent] = children.get(node.parent, 0) + 1
        assert children == self._children, "children counts drifted"
        assert self.bytes == sum(node.size for node in self._nodes.values()), "byte count drifted"
        valid = {serial for _, serial, node in self._heap if node.serial == serial}
        for node in self._nodes.values():
            assert not self._evictable(node) or node.serial in valid, "an evictable chunk is not in the heap"

    def _evictable(self, node: Candidate) -> bool:
        return not node.blocked and node.key not in self._children

    def _offer(self, node: Candidate) -> None:
        if node.serial >= 0 or not self._evictable(node):
            return
        self._serial += 1
        node.serial = self._serial
        heapq.heappush(self._heap, (node.priority, node.serial, node))

    def _compact(self) -> None:
        # Entries of removed chunks stay in the heap until popped; rebuilding when they outnumber
        # the living bounds the heap and costs O(1) per removal on average.
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = [entry for entry in self._heap if entry[2].serial == entry[1]]
            heapq.heapify(self._heap)
