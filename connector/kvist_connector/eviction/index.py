"""The order in which one tier's chunks leave.

`EvictionIndex` keeps the promises that every policy gets for free: no chunk goes before its
children, a blocked one (leased, pinned, being copied) never goes. Only chunks without children
are in queues, so a use of a whole chain costs one entry. All calls are O(log n) amortised; after a
policy has learned, the next `pop` ranks the queues anew.
"""

from __future__ import annotations

import heapq

from kvist_connector.eviction.candidate import NEVER, Candidate, Policy


class EvictionIndex:
    """Chunks of one tier and the order in which they may leave."""

    def __init__(self, rule: Policy) -> None:
        self._rule = rule
        self._nodes: dict[bytes, Candidate] = {}
        self._children: dict[bytes, int] = {}  # by parent key, whether or not the parent is in the tier
        self._queues: dict[int, list[tuple[int, int, Candidate]]] = {}
        self._order: list[tuple[float, int]] = []  # rank and number of each queue
        self._revision = rule.revision
        self._due: list[tuple[int, int]] = []  # when the first of a queue may have aged out of it
        self._due_of: dict[int, int] = {}  # by queue, the entry that counts
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
        node, before = Candidate(key, parent, size, weight, now, self._tick), self._nodes.get(parent)
        node.depth = before.depth + 1 if before is not None else 0
        self._rule.enter(node, before)
        self._nodes[key] = node
        self._children[parent] = self._children.get(parent, 0) + 1
        self.bytes += size
        self._offer(node)

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

    def answer(self, key: bytes, chunks: int = 0) -> None:
        """The prompt used last ends with the chunk: what is added after it belongs to the answer.

        `chunks`: of the answer that are known of already. A key that is not in the tier is nothing.
        """
        node = self._nodes.get(key)
        if node is not None:
            self._rule.answer(node, chunks)
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
        if self._revision != self._rule.revision:
            self._revision = self._rule.revision
            self._queues = {number: queue for number, queue in self._queues.items() if queue}
            self._order = [(self._rule.rank(number), number) for number in self._queues]
            heapq.heapify(self._order)
        while self._order:
            number = self._order[0][1]
            node = self._head(number)
            if number != self._order[0][1]:
                continue  # one that had aged went to a queue of less rank
            if node is not None:
                return node
            heapq.heappop(self._order)
            del self._queues[number]
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree; for tests and the integrity endpoint."""
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            children[node.parent] = children.get(node.parent, 0) + 1
        assert children == self._children, "children counts drifted"
        assert self.bytes == sum(node.size for node in self._nodes.values()), "byte count drifted"
        assert sorted(number for _, number in self._order) == sorted(self._queues), "a queue has no rank"
        assert all(number in self._due_of for number, queue in self._queues.items() if queue), "due lost"
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
        queue = self._queues.get(node.queue)
        if queue is None:
            queue = self._queues[node.queue] = []
            heapq.heappush(self._order, (self._rule.rank(node.queue), node.queue))
        heapq.heappush(queue, (node.tick, node.serial, node))
        self._entries += 1
        if queue[0][2] is node:
            self._expect(node.queue, node)
        return True

    def _expect(self, number: int, first: Candidate) -> None:
        """Look at a queue again when its first may have aged out of it."""
        due = self._rule.moves(first, number)
        if due < self._due_of.get(number, NEVER + 1):
            self._due_of[number] = due
            heapq.heappush(self._due, (due, number))

    def _age(self) -> None:
        while self._due and self._due[0][0] <= self._tick:
            due, number = heapq.heappop(self._due)
            if self._due_of.get(number) != due:
                continue
            del self._due_of[number]
            first = self._head(number) if number in self._queues else None
            if first is not None:
                self._expect(number, first)

    def _head(self, number: int) -> Candidate | None:
        """Its least recently used; those whose queue is another by now move there."""
        queue = self._queues[number]
        while queue:
            _, serial, node = queue[0]
            valid = node.serial == serial
            if valid and self._evictable(node) and self._rule.queue(node, self._tick) == number:
                return node
            heapq.heappop(queue)
            self._entries -= 1
            if valid:
                node.serial = -1
                self._offer(node)
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
