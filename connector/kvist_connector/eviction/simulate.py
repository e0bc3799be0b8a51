"""Replays a trace through the very index and policies of the agent, and through the offline optimum.

A request uses its leading blocks that are in the cache, then adds the rest one after another, each
after room was made for it. Its own blocks cannot leave meanwhile, as in the agent, where they are leased.
Blocks of its answer do not enter, since a trace does not name them, but the policy hears how many tokens were
decoded, as it does from an engine.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvist_connector.eviction.candidate import Policy
from kvist_connector.eviction.index import EvictionIndex
from kvist_connector.eviction.trace import Trace

Progress = Callable[[int], None]
_PROGRESS_REQUESTS: Final = 64
_NEVER: Final = 2**62


@dataclass(frozen=True)
class Hits:
    """Of the requests from the `first` on."""

    tokens: int
    hit_tokens: int
    blocks: int
    hit_blocks: int

    @property
    def rate(self) -> float:
        """Share of the prompt tokens found in the cache."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def replay(
    trace: Trace, capacity: int, rule: Policy, first: int = 0, progress: Progress = lambda requests: None
) -> Hits:
    """`capacity` in blocks."""
    index = EvictionIndex(rule)
    counts = _Counts(trace, first)
    for number in range(len(trace)):
        counts.add(number, _serve(trace, index, capacity, number))
        if number % _PROGRESS_REQUESTS == 0:
            progress(number)
    return counts.hits()


def _serve(trace: Trace, index: EvictionIndex, capacity: int, number: int) -> int:
    """Leading blocks found. The last block of the path is held: those before it have a child."""
    keys = [_key(block) for block in trace.request(number)]
    found = next((i for i, key in enumerate(keys) if key not in index), len(keys))
    for key in keys[:found]:
        index.touch(key, float(number))
    held = keys[found - 1] if found else None
    if held is not None:
        index.block(held)
    for at in range(found, len(keys)):
        if len(index) >= capacity and index.pop() is None:
            break
        index.add(keys[at], keys[at - 1] if at else b"", 1, 1.0, float(number))
        index.block(keys[at])
        if held is not None:
            index.unblock(held)
        held = keys[at]
    if held is not None:
        index.unblock(held)
    index.answer(keys[-1], trace.answers[number])
    return found


def optimum(trace: Trace, capacity: int, first: int = 0, progress: Progress = lambda requests: None) -> Hits:
    """The most blocks that any order of eviction can hit, with all of the future known.

    Belady's MIN for blocks of equal size, with the choice not to keep a new block: what is used
    farthest in the future leaves, among equals the deepest. A chain is used from its first block on,
    so no block is used later than one after it: the rule that children leave before their parents
    costs MIN nothing, and what it hits is a leading part of each prompt. Shorter last blocks count
    as whole ones in the choice, so in tokens it is the optimum only up to those.
    """
    following = _next_requests(trace)
    resident: dict[int, int] = {}  # block -> request that uses it next
    leaving: list[tuple[int, int, int]] = []  # farthest first; entries of earlier uses are stale
    counts = _Counts(trace, first)
    for number in range(len(trace)):
        start, end = trace.starts[number], trace.starts[number + 1]
        found = next((i for i in range(start, end) if trace.blocks[i] not in resident), end) - start
        counts.add(number, found)
        for at in range(start, end):
            block, after = trace.blocks[at], following[at]
            if (
                block not in resident
                and len(resident) >= capacity
                and not _displace(resident, leaving, after)
            ):
                break
            resident[block] = after
            heapq.heappush(leaving, (-after, start - at, block))
        if number % _PROGRESS_REQUESTS == 0:
            progress(number)
    return counts.hits()


def _displace(resident: dict[int, int], leaving: list[tuple[int, int, int]], after: int) -> bool:
    """Drop the block used farthest ahead, if that is later than `after`."""
    while leaving:
        next_use, _, block = leaving[0]
        if resident.get(block) == -next_use:
            if -next_use <= after:
                return False
            heapq.heappop(leaving)
            del resident[block]
            return True
        heapq.heappop(leaving)
    return False


def _next_requests(trace: Trace) -> array[int]:
    following = array("q", [_NEVER]) * len(trace.blocks)
    seen = array("q", [_NEVER]) * trace.distinct
    for number in range(len(trace) - 1, -1, -1):
        for at in range(trace.starts[number], trace.starts[number + 1]):
            following[at] = seen[trace.blocks[at]]
            seen[trace.blocks[at]] = number
    return following


def _key(block: int) -> bytes:
    return block.to_bytes(8, "little")


class _Counts:
    def __init__(self, trace: Trace, first: int) -> None:
        self._trace = trace
        self._first = first
        self._sums = [0, 0, 0, 0]

    def add(self, number: int, found: int) -> None:
        if number < self._first:
            return
        whole = self._trace.starts[number + 1] - self._trace.starts[number]
        tokens = self._trace.tokens(number, whole), self._trace.tokens(number, found)
        self._sums = [total + more for total, more in zip(self._sums, (*tokens, whole, found), strict=True)]

    def hits(self) -> Hits:
        return Hits(*self._sums)
