"""The order in which one tier's chunks leave.

`EvictionIndex` keeps the promises that every policy gets for free: no chunk goes before its
children, a blocked one (leased, pinned, being copied) never goes. Only chunks without children
are in queues, so a use of a whole chain costs one entry. All calls are O(log n) amortised,
`pop` besides one look at each queue.
"""

from __future__ import annotations

import heapq

from kvist_connector.eviction.candidate import Candidate, Policy


class EvictionIndex:
    """Chunks of one tier and the order in which they may leave."""

    def __init__(self, rule: Policy) -> None:
        self._rule = rule
        self._nodes: dict[bytes, Candidate] = {}
        self._children: dict[bytes, int] = {}  # by parent key, whether or not the parent is in the tier
        self._queues: dict[int, list[tuple[int, int, Candidate]]] = {}
        self._entries = 0  # in all queues, those no longer valid too
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
        node = Candidate(key, parent, size, weight, now, self._tick)
        self._rule.enter(node, self._nodes.get(parent))
        self._nodes[key] = node
        self._children[parent] = self._children.get(parent, 0) + 1
        self.bytes += size
        self._offer(node)

    def remove(self, key: bytes) -> None:
        """A chunk leaves the tier for any reason but eviction."""
        self._remove(self._nodes[key], False)

    def touch(self, key: bytes, now: float) -> None:
        """The chunk was used."""
        node = self._nodes[key]
        self._tick += 1
        self._rule.use(node, self._tick)
        node.used, node.tick = now, self._tick
        node.hits += 1
        self._renew(node)

    def weigh(self, key: bytes, weight: float) -> None:
        """A hit on the chunk is worth another number of seconds now."""
        node = self._nodes[key]
        node.weight = weight
        self._renew(node)

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

    def worth(self, key: bytes) -> float:
        """Of keeping the chunk now, in the policy's own unit."""
        node = self._nodes[key]
        return self._rule.worth(node, self._rule.queue(node, self._tick))

    def pop(self) -> Candidate | None:
        """Remove and return the chunk to evict; None when everything left is blocked."""
        best: Candidate | None = None
        least = 0.0
        waiting = list(self._queues)
        for number in waiting:
            node = self._head(number, waiting)
            if node is not None and ((worth := self._rule.worth(node, number)) < least or best is None):
                best, least = node, worth
        if best is not None:
            self._remove(best, True)
        return best

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree; for tests and the integrity endpoint."""
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            children[node.parent] = children.get(node.parent, 0) + 1
        assert children == self._children, "children counts drifted"
        assert self.bytes == sum(node.size for node in self._nodes.values()), "byte count drifted"
        assert self._entries == sum(map(len, self._queues.values())), "entry count drifted"
        valid = {
            entry[1] for queue in self._queues.values() for entry in queue if entry[2].serial == entry[1]
        }
        for node in self._nodes.values():
            assert not self._evictable(node) or node.serial in valid, "an evictable chunk is in no queue"

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

    def _offer(self, node: Candidate) -> bool:
        if node.serial >= 0 or not self._evictable(node):
            return False
        self._serial += 1
        node.serial = self._serial
        node.queue = self._rule.queue(node, self._tick)
        heapq.heappush(self._queues.setdefault(node.queue, []), (node.tick, node.serial, node))
        self._entries += 1
        return True

    def _head(self, number: int, waiting: list[int]) -> Candidate | None:
        """Its least recently used; those whose queue is another by now move, to be seen in `waiting`."""
        queue = self._queues.get(number, [])
        while queue:
            _, serial, node = queue[0]
            valid = node.serial == serial
            if valid and self._evictable(node) and self._rule.queue(node, self._tick) == number:
                return node
            heapq.heappop(queue)
            self._entries -= 1
            if valid:
                node.serial = -1
                if self._offer(node):
                    waiting.append(node.queue)
        self._queues.pop(number, None)
        return None

    def _compact(self) -> None:
        # Entries of removed chunks stay until they come up; rebuilding when they outnumber
        # the living bounds the queues and costs O(1) per removal on average.
        if self._entries <= 2 * len(self._nodes) + 64:
            return
        for number, queue in list(self._queues.items()):
            kept = [entry for entry in queue if entry[2].serial == entry[1]]
            heapq.heapify(kept)
            self._queues[number] = kept
        self._entries = sum(map(len, self._queues.values()))
