"""One simulated engine: continuous batching, chunked prefill, prefix cache. Called by cluster.py.

Passes follow vLLM's scheduler: running sequences first, then waiting ones in order while their
whole prompt fits; the youngest is preempted when a block is missing. Durations are the polynomials of
NVIDIA Dynamo's mocker (lib/mocker/src/common/perf_model.rs), which its offline replay uses:

    prefill ms = 4.209989e-7 n^2 + 1.518344e-2 n + 16.50142     n new tokens of the pass
    decode ms  = -25.74 u^2 + 54.01 u + 5.74                    u context of those that decode, by KV space

As there, a first token comes out of the prefill, and what was generated before a preemption is computed again
for nothing. Passes in which nothing but decoding happens are one event: nothing changes until the next
sequence ends, needs a block, or arrives.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from bench.simulation.pool import BlockPool
from bench.simulation.trace import BLOCK_TOKENS, Request

FINISH, GROW = 0, 1  # in this order at the same pass


@dataclass(frozen=True)
class EngineSpec:
    """Sizes of every engine; the host tier is off at 0 blocks."""

    blocks: int
    batch_tokens: int = 8192
    sequences: int = 256
    host_blocks: int = 0
    host_seconds: float = 0.0  # to load one block


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in an engine."""

    request: Request
    length: int  # tokens known: prompt and what was generated
    computed: int = 0
    cached: int = 0  # tokens reused at the first admission
    admitted: bool = False
    generated: int = 0
    named: int = 0  # leading prompt blocks that have their ids
    taken: int = 0  # blocks of all kinds
    base: int = 0  # its context less the passes so far, while it decodes
    ready_pass: int = -1  # pass of its first token since it was admitted; -1 while it prefills
    turn: int = 0  # invalidates what was planned before a preemption


@dataclass
class Outcome:
    """What a pass brought about: sequences with their first token, and ended ones."""

    first: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)


class Engine:
    """`advance` at the end of a pass, `arrive` at any time; `ends` is when the pass in progress ends."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.pool = BlockPool(spec.blocks, spec.host_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.ends = math.inf
        self.preemptions = 0
        self._decoding = 0
        self._base = 0  # of those that decode
        self._passes = 0  # those in which tokens were generated
        self._plan: list[tuple[int, int, int, Sequence, int]] = []
        self._order = 0
        self._coast: tuple[float, int] | None = None  # start, passes
        self._ready: list[Sequence] = []
        self._outputs = -1

    @property
    def prefill_tokens(self) -> tuple[int, int]:
        """Tokens that wait to be computed, and those of running prefills."""
        waiting = sum(item.length for item in self.waiting)
        return waiting, sum(item.length - item.computed for item in self.running if item.ready_pass < 0)

    def arrive(self, request: Request, now: float) -> None:
        """Queue a request. The pass in progress goes on; of several planned ones, none after it."""
        if math.ceil(request.tokens / BLOCK_TOKENS) > self.spec.blocks:
            raise ValueError(
                f"request {request.number}: {request.tokens} tokens; raise blocks above {self.spec.blocks}"
            )
        self.waiting.append(Sequence(request, request.tokens))
        if self.ends == math.inf:
            self._start(now)
        elif self._coast is not None and not self._blocked():
            start, count = self._coast
            done = 1 + bisect_left(range(1, count), now - start, key=self._decode_seconds)
            self._coast, self.ends = (start, done), start + self._decode_seconds(done)

    def advance(self) -> Outcome:
        """The pass ended: tell what came of it, begin the next."""
        now, outcome = self.ends, Outcome()
        if self._coast is not None:
            self._passes += self._coast[1]
        elif self._decoding or self._ready:
            self._passes += 1
        for item in self._ready:
            self._first(item, outcome)
        while self._plan and self._plan[0][0] <= self._passes and self._plan[0][1] == FINISH:
            *_, item, turn = heapq.heappop(self._plan)
            if item.turn == turn:
                self._end(item)
                outcome.ended.append(item)
        self._start(now)
        return outcome

    # ---- one pass

    def _start(self, now: float) -> None:
        self._coast, self._ready = None, []
        self._grow()
        seconds, new = self._schedule()
        if new:
            seconds += (4.209989e-7 * new * new + 1.518344e-2 * new + 16.50142) / 1000
        if not new and not self._decoding:
            self.ends = math.inf
            return
        if new:
            self.ends = now + seconds + (self._decode_seconds(1) if self._decoding else 0.0)
        else:
            count = max(1, self._until_change())
            self._coast, self.ends = (now, count), now + self._decode_seconds(count)

    def _decode_seconds(self, count: int) -> float:
        """Of `count` passes from now on: a sum of the polynomial, as each adds a token to every context."""
        total = self.pool.total * BLOCK_TOKENS
        share, step = (self._base + self._decoding * self._passes) / total, self._decoding / total
        if share >= 1:  # contexts share blocks
            return count * 0.03401
        first, second = count * (count - 1) / 2, (count - 1) * count * (2 * count - 1) / 6
        squares = count * share * share + 2 * share * step * first + step * step * second
        return (-25.74 * squares + 54.01 * (count * share + step * first) + 5.74 * count) / 1000

    def _until_change(self) -> int:
        while self._plan and self._plan[0][4] != self._plan[0][3].turn:
            heapq.heappop(self._plan)
        return self._plan[0][0] - self._passes

    def _grow(self) -> None:
        """Blocks for the tokens that this pass decodes. A plan for GROW names the pass before."""
        while self._plan and self._plan[0][0] <= self._passes and self._plan[0][1] == GROW:
            at, _, _, item, turn = heapq.heappop(self._plan)
            if item.turn != turn:
                continue
            while item.turn == turn and not self.pool.room(1):
                self._preempt()
            if item.turn == turn:
                self.pool.take(1)
                item.taken += 1
                self._planned(at + BLOCK_TOKENS, GROW, item)

    def _schedule(self) -> tuple[float, int]:
        """Prefill work of this pass: seconds of loading, tokens to compute."""
        budget, new, preempted = self.spec.batch_tokens - self._decoding, 0, self.preemptions
        for item in [item for item in self.running if item.ready_pass < 0]:
            if budget > 0 and item.ready_pass < 0 and item in self.running:
                used, priced = self._compute(item, budget)
                budget, new = budget - used, new + priced
        load = 0.0
        while self.waiting and budget > 0 and self.preemptions == preempted and not self._blocked():
            item = self.waiting.popleft()
            load += self._admit(item)
            used, priced = self._compute(item, budget)
            budget, new = budget - used, new + priced
        return load, new

    def _blocked(self) -> bool:
        if len(self.running) >= self.spec.sequences:
            return True
        item = self.waiting[0]
        blocks = item.request.blocks[: self._most(item)]
        reused = blocks[: self.pool.hit(blocks)]
        return not self.pool.room(self.pool.needs(reused, math.ceil(item.length / BLOCK_TOKENS)))

    def _admit(self, item: Sequence) -> float:
        """Reuse what is cached; returns the seconds of loading from the host tier."""
        blocks = item.request.blocks[: self._most(item)]
        hit = self.pool.hit(blocks)
        self.pool.share(blocks[:hit])
        host = self.pool.host_hit(blocks, hit)
        self.pool.take(host)
        self.pool.name(blocks[hit : hit + host])
        item.named = item.taken = hit + host
        item.computed = (hit + host) * BLOCK_TOKENS
        if not item.admitted:
            item.admitted, item.cached = True, item.computed
        self.running.append(item)
        return host * self.spec.host_seconds

    @staticmethod
    def _most(item: Sequence) -> int:
        """Blocks that may be reused: the last token is computed."""
        return min(len(item.request.blocks), (item.length - 1) // BLOCK_TOKENS)

    def _compute(self, item: Sequence, budget: int) -> tuple[int, int]:
        """Tokens of the budget, and those of them that the prefill's time counts: the prompt's."""
        used, before = min(budget, item.length - item.computed), item.computed
        after = before + used
        more = math.ceil(after / BLOCK_TOKENS) - item.taken
        turn = item.turn
        while not self.pool.room(more):
            self._preempt()
            if item.turn != turn:
                return 0, 0
        self.pool.take(more)
        item.taken += more
        full = min(len(item.request.blocks), after // BLOCK_TOKENS)
        self.pool.name(item.request.blocks[item.named : full])
        item.named, item.computed = max(item.named, full), after
        if after == item.length:
            self._ready.append(item)
        prompt = item.request.tokens
        return used, min(after, prompt) - min(before, prompt)

    def _first(self, item: Sequence, outcome: Outcome) -> None:
        if not item.generated:
            outcome.first.append(item)
        item.ready_pass = self._passes
        item.base = item.length + 1 - self._passes
        self._base += item.base
        self._decoding += 1
        left = item.request.output - item.generated
        self._planned(self._passes + left - 1, FINISH, item)
        self._planned(self._passes + item.taken * BLOCK_TOKENS - item.length, GROW, item)

    def _planned(self, at: int, kind: int, item: Sequence) -> None:
        self._order += 1
        heapq.heappush(self._plan, (at, kind, self._order, item, item.turn))

    # ---- ends

    def _preempt(self) -> None:
        item = self.running[-1]
        self.preemptions += 1
        if item.ready_pass >= 0:
            made = self._passes - item.ready_pass + 1
            item.generated += made
            item.length += made
        if item in self._ready:
            self._ready.remove(item)
        self._leave(item, 0)
        item.computed = item.named = item.taken = 0
        self.waiting.appendleft(item)

    def _end(self, item: Sequence) -> None:
        total = item.request.tokens + item.request.output - 1
        self._leave(item, max(0, total // BLOCK_TOKENS - item.named))

    def _leave(self, item: Sequence, outputs: int) -> None:
        ids = range(self._outputs - outputs + 1, self._outputs + 1)
        self._outputs -= outputs
        self.pool.release(item.request.blocks[: item.named], item.taken - item.named, ids)
        if item.ready_pass >= 0:
            self._decoding -= 1
            self._base -= item.base
        item.turn += 1
        item.ready_pass = -1
        self.running.remove(item)
