"""The event loop: a trace, engines, and a router that chooses; what came of it.

A `Router` sees requests when they arrive, and their first token and end when they happen. It reads
the engines' caches as a cache feed would tell them.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from bench.harness import percentile
from bench.simulation.engine import Engine, EngineSpec, Sequence
from bench.simulation.trace import Request


class Router(Protocol):
    """One way to choose an engine."""

    def choose(self, request: Request, now: float) -> int:
        """Number of the engine."""

    def first_token(self, request: Request, engine: int, now: float) -> None:
        """The prefill is over."""

    def ended(self, request: Request, engine: int, now: float) -> None:
        """The last token came."""


@dataclass(frozen=True)
class Summary:
    """Of one run. `hit`: reused over all prompt tokens; `imbalance`: most over mean computed tokens."""

    hit: float
    mean: float  # TTFT, seconds
    p99: float
    imbalance: float
    completed: int
    seconds: float


def simulate(trace: Many[Request], engines: Many[Engine], router: Router) -> Summary:
    """Run the whole trace until every request has ended."""
    return _Run(trace, engines, router).run()


class _Run:
    def __init__(self, trace: Many[Request], engines: Many[Engine], router: Router) -> None:
        self._trace, self._engines, self._router = trace, engines, router
        self._due: list[tuple[float, int]] = []
        self._ttft: list[float] = []
        self._computed = [0] * len(engines)
        self._reused = self._ended = 0
        self._now = 0.0

    def run(self) -> Summary:
        for request in self._trace:
            self._until(request.at)
            self._now = request.at
            number = self._router.choose(request, request.at)
            self._engines[number].arrive(request, request.at)
            self._push(number)
        self._until(float("inf"))
        total = sum(request.tokens for request in self._trace)
        return Summary(
            self._reused / total, statistics.fmean(self._ttft), percentile(self._ttft, 0.99),
            max(self._computed) / max(1.0, statistics.fmean(self._computed)), self._ended, self._now,
        )  # fmt: skip

    def _push(self, number: int) -> None:
        ends = self._engines[number].ends
        if ends != float("inf"):
            heapq.heappush(self._due, (ends, number))

    def _until(self, limit: float) -> None:
        while self._due and self._due[0][0] <= limit:
            at, number = heapq.heappop(self._due)
            if self._engines[number].ends != at:
                continue  # an arrival moved it
            self._now = at
            outcome = self._engines[number].advance()
            for item in outcome.first:
                self._first(item, number)
            for item in outcome.ended:
                self._ended += 1
                self._router.ended(item.request, number, at)
            self._push(number)

    def _first(self, item: Sequence, number: int) -> None:
        self._ttft.append(self._now - item.request.at)
        self._reused += item.cached
        self._computed[number] += item.request.tokens - item.cached
        self._router.first_token(item.request, number, self._now)


def engines(spec: EngineSpec, count: int = 8) -> list[Engine]:
    """Empty engines."""
    return [Engine(spec) for _ in range(count)]
