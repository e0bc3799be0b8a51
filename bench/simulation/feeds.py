"""What the agents' feeds of simulated engines tell routers, and when. Called by ours.py.

An engine's changes are read once for all routers; each has a `Reader` of its own that passes them on `lag`
seconds later. In between nothing is lost: a feed is a sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass

from bench.simulation.engine import Engine
from bench.simulation.trace import BLOCK_TOKENS
from kvist_connector.protocol.engine import EngineLoad

FULL_PASS = 8192
PREFILL_SECONDS = (4.209989e-7 * FULL_PASS**2 + 1.518344e-2 * FULL_PASS + 16.50142) / 1000 / FULL_PASS


@dataclass(frozen=True, slots=True)
class Told:
    """Of one engine at one time: what changed since the time before, and how busy it is."""

    at: float
    changes: tuple[tuple[bool, bool, int], ...]  # on host, added, block
    load: EngineLoad


class Feeds:
    """The feeds of all engines."""

    def __init__(self, engines: Many[Engine]) -> None:
        self._engines = engines
        self._readers: list[Reader] = []

    def reader(self, lag: float = 0.0) -> Reader:
        """One more router that reads them; all readers come before the first read."""
        self._readers.append(Reader(self, len(self._engines), lag))
        return self._readers[-1]

    def read(self, now: float) -> None:
        """Look at the engines."""
        for number, engine in enumerate(self._engines):
            told = Told(now, tuple(engine.pool.changes), _load(engine))
            engine.pool.changes.clear()
            for reader in self._readers:
                reader.waiting[number].append(told)


class Reader:
    """One router's view of them."""

    def __init__(self, feeds: Feeds, engines: int, lag: float) -> None:
        self._feeds, self._lag = feeds, lag
        self.waiting: list[deque[Told]] = [deque() for _ in range(engines)]

    def read(self, now: float) -> list[list[Told]]:
        """What has arrived by now, of each engine."""
        self._feeds.read(now)
        return [self._arrived(queue, now - self._lag) for queue in self.waiting]

    @staticmethod
    def _arrived(queue: deque[Told], until: float) -> list[Told]:
        found = []
        while queue and queue[0].at <= until:
            found.append(queue.popleft())
        return found


def _load(engine: Engine) -> EngineLoad:
    waiting, running = engine.prefill_tokens
    return EngineLoad(
        waiting_requests=len(engine.waiting), running_requests=len(engine.running),
        decode_sequences=sum(item.ready_pass >= 0 for item in engine.running),
        waiting_prefill_tokens=waiting, running_prefill_tokens=running,
        kv_tokens_total=engine.spec.blocks * BLOCK_TOKENS, kv_tokens_used=engine.pool.active * BLOCK_TOKENS,
        prefill_seconds_per_token=PREFILL_SECONDS,
    )  # fmt: skip
