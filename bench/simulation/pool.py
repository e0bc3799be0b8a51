"""KV blocks of one simulated engine: held by requests, idle in LRU order, and below them a host tier.

Called by engine.py. Full prompt blocks have ids and are shared; others are only counted. The host tier,
where there is one, gets every block when it is computed, as the connector stores them, and forgets the one
unused for longest. `changes` are what a cache feed would say since it was last drained.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """`total` GPU blocks, `host` blocks below."""

    def __init__(self, total: int, host: int = 0) -> None:
        self.total, self._host_total = total, host
        self.held: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.host: OrderedDict[int, None] = OrderedDict()
        self.loose = 0  # in use, without id
        self.changes: list[tuple[bool, bool, int]] = []  # on host, added, block

    @property
    def active(self) -> int:
        """Blocks in use by requests."""
        return len(self.held) + self.loose

    def hit(self, blocks: Sequence[int]) -> int:
        """Leading blocks on the GPU."""
        count = 0
        for block in blocks:
            if block not in self.held and block not in self.idle:
                break
            count += 1
        return count

    def host_hit(self, blocks: Sequence[int], start: int) -> int:
        """Blocks from `start` on that the host tier has, without a gap."""
        count = start
        while count < len(blocks) and blocks[count] in self.host:
            count += 1
        return count - start

    def needs(self, blocks: Sequence[int], total: int) -> int:
        """Free blocks that a prompt of `total` blocks takes whose leading `blocks` are on the GPU."""
        return total - sum(block in self.held for block in blocks)

    def room(self, count: int) -> bool:
        """Whether that many blocks can be had, idle ones evicted."""
        return self.total - self.active >= count

    def share(self, blocks: Sequence[int]) -> None:
        """A request uses blocks that are here."""
        for block in blocks:
            if block in self.idle:
                del self.idle[block]
            self.held[block] = self.held.get(block, 0) + 1

    def take(self, count: int) -> None:
        """Blocks to compute into; the caller has asked `room`."""
        self.loose += count
        while self.active + len(self.idle) > self.total:
            self._evict()

    def name(self, blocks: Sequence[int]) -> None:
        """Computed blocks get their ids: from now on others find them."""
        for block in blocks:
            self.loose -= 1
            if block in self.idle:
                del self.idle[block]
            elif block not in self.held:
                self.changes.append((False, True, block))
                self._store(block)
            self.held[block] = self.held.get(block, 0) + 1

    def release(self, blocks: Sequence[int], loose: int, outputs: Sequence[int] = ()) -> None:
        """A request ends; its tail is the first to go. `outputs`: ids of full blocks after the prompt."""
        self.loose -= loose
        self.idle.update(dict.fromkeys(reversed(outputs)))
        for block in reversed(blocks):
            self._store(block)
            left = self.held[block] - 1
            if left:
                self.held[block] = left
            else:
                del self.held[block]
                self.idle[block] = None

    def _evict(self) -> None:
        block, _ = self.idle.popitem(last=False)
        if block < 0:
            return
        self.changes.append((False, False, block))

    def _store(self, block: int) -> None:
        """Into the host tier; a block that is there becomes the most recently used."""
        if not self._host_total:
            return
        if block not in self.host:
            self.changes.append((True, True, block))
        self.host[block] = None
        self.host.move_to_end(block)
        if len(self.host) > self._host_total:
            self.changes.append((True, False, self.host.popitem(last=False)[0]))
