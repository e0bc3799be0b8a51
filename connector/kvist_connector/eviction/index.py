"""The order in which one tier's chunks leave.

`EvictionIndex` keeps the promises that every policy gets for free: no chunk goes before its
children, a blocked one (leased, pinned, being copied) never goes. Only chunks without children
are in queues, so a use of a whole chain costs one entry. All calls are O(log n) amortised.
"""

from __future__ import annotations

import heapq
from typing import Final

from kvist_connector.eviction.candidate import NEVER, Candidate, Policy
from kvist_connector.eviction.factors import Learned

_FEWEST: Final = 128


class EvictionIndex:
    """Chunks of one tier and the order in which they may leave."""

    def __init__(self, rule: Policy) -> None:
        self._rule = rule
        self._nodes: dict[bytes, Candidate] = {}
        self._children: dict[bytes, int] = {}  # by parent key, whether or not the parent is in the tier
        # Entries whose serial number is no longer their chunk's do not count.
        self._order: list[tuple[int, int, int, Candidate]] = []  # queue, last use, serial
        self._due: list[tuple[int, int, Candidate]] = []  # when it may have aged out of its queue, serial
        self._most = _FEWEST  # entries in both until those that do not count are taken out
        self._serial = 0
        self._tick = 0
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
        self._tick += 1
        node, before = Candidate(key, parent, size, weight, now, self._tick), self._nodes.get(parent)
        node.depth = before.depth + 1 if before is not None else 0
        self._rule.enter(node, before)
        self._nodes[key] = node
        self._children[parent] = self._children.get(parent, 0) + 1
        if before is not None:
            before.serial = -1  # it may not go before its child
        self.bytes += size
        self._offer(node)
        self._compact()

    def remove(self, key: bytes) -> None:
        """A chunk leaves the tier for any reason but eviction."""
        self._remove(self._nodes[key], False)

    def touch(self, key: bytes, now: float) -> None:
        """The chunk was used; those of a prompt in their order."""
        node = self._nodes[key]
        self._tick += 1
        self._rule.use(node, self._nodes.get(node.parent), self._tick)
        node.used, node.tick = now, self._tick
        node.hits += 1
        self._renew(node)

    def answer(self, key: bytes, tokens: int | None = None) -> None:
        """The prompt used last ends with the chunk: what is added after it belongs to the answer.

        `tokens`: how many were decoded, once that is known. A key that is not in the tier is nothing.
        """
        node = self._nodes.get(key)
        if node is not None:
            self._rule.answer(node, tokens)

    def weigh(self, key: bytes, weight: float) -> None:
        """A hit on the chunk is worth another number of seconds now."""
        node = self._nodes[key]
        node.weight = weight
        self._renew(node)

    def learned(self) -> Learned | None:
        """See Policy."""
        return self._rule.learned()

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

    def may_go(self, key: bytes) -> bool:
        """Whether a chunk of the tier has no children there and is not blocked."""
        return self._evictable(self._nodes[key])

    def worth(self, key: bytes) -> float:
        """Of keeping the chunk now, in the policy's own unit."""
        node = self._nodes[key]
        return self._rule.worth(node, self._rule.queue(node, self._tick))

    def pop(self) -> Candidate | None:
        """Remove and return the chunk to evict; None when everything left is blocked."""
        node = self.next()
        if node is not None:
            self._remove(node, True)
        return node

    def may_leave(self, key: bytes) -> bool:
        """Whether nothing keeps the chunk: no block, no child here."""
        return self._evictable(self._nodes[key])

    def next(self) -> Candidate | None:
        """The chunk that `pop` would remove."""
        self._age()
        while self._order:
            _, _, serial, node = self._order[0]
            if node.serial == serial and self._evictable(node):
                return node
            heapq.heappop(self._order)
            if node.serial == serial:
                node.serial = -1
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree; for tests and the integrity endpoint."""
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            children[node.parent] = children.get(node.parent, 0) + 1
        assert children == self._children, "children counts drifted"
        assert self.bytes == sum(node.size for node in self._nodes.values()), "byte count drifted"
        valid = {serial for _, _, serial, node in self._order if node.serial == serial}
        aging = {serial for _, serial, node in self._due if node.serial == serial}
        for node in self._nodes.values():
            assert not self._evictable(node) or node.serial in valid, "an evictable chunk is in no queue"
            assert (
                node.serial not in valid
                or node.serial in aging
                or (self._rule.moves(node, self._tick) == NEVER)
            ), "a chunk would not age"

    def _evictable(self, node: Candidate) -> bool:
        return not node.blocked and node.key not in self._children

    def _remove(self, node: Candidate, evicted: bool) -> None:
        del self._nodes[node.key]
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
        self._rule.leave(node, self._tick, evicted)
        self._compact()

    def _renew(self, node: Candidate) -> None:
        if node.serial >= 0:
            node.serial = -1
            self._offer(node)
            self._compact()

    def _offer(self, node: Candidate) -> None:
        if node.serial >= 0 or not self._evictable(node):
            return
        self._serial += 1
        node.serial = self._serial
        node.queue = self._rule.queue(node, self._tick)
        heapq.heappush(self._order, (node.queue, node.tick, node.serial, node))
        self._expect(node)

    def _expect(self, node: Candidate) -> None:
        """Look at the chunk again when it may have aged out of its queue."""
        due = self._rule.moves(node, self._tick)
        if due < NEVER:
            heapq.heappush(self._due, (due, node.serial, node))

    def _age(self) -> None:
        while self._due and self._due[0][0] <= self._tick:
            _, serial, node = heapq.heappop(self._due)
            if node.serial != serial:
                continue
            if not self._evictable(node):
                node.serial = -1
            elif self._rule.queue(node, self._tick) == node.queue:
                self._expect(node)
            else:
                self._renew(node)

    def _compact(self) -> None:
        # Entries that no longer count stay until they come up; rebuilding when they outnumber
        # the others bounds the queues and costs O(1) per change on average.
        if len(self._order) + len(self._due) <= self._most:
            return
        self._order = [entry for entry in self._order if entry[3].serial == entry[2]]
        self._due = [entry for entry in self._due if entry[2].serial == entry[1]]
        heapq.heapify(self._order)
        heapq.heapify(self._due)
        self._most = 2 * (len(self._order) + len(self._due)) + _FEWEST
