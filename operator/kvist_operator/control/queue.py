"""Work queue of keys: each waits at most once, none is worked on twice at a time, failures back off.

Producers (watches, the sweep, the router poll) `add`; workers `get`, work, then `done`. A key added
while it is being worked on comes again after `done`. Bounded: beyond `limit` keys an add is refused and
counted, which loses nothing, since the periodic sweep finds the key again.

All methods belong to one loop; other threads use call_soon_threadsafe.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
IDLE_SECONDS = 60.0


@dataclass(frozen=True)
class Backoff:
    """Pause after the n-th failure in a row: base * 2^(n-1), at most `cap` seconds, up to a fifth less."""

    base: float = 0.5
    cap: float = 120.0

    def pause(self, failures: int, jitter: float) -> float:
        """`jitter` in [0, 1) spreads keys that failed together."""
        return min(self.cap, self.base * 2.0 ** min(failures - 1, 30)) * (1 - 0.2 * jitter)


class WorkQueue(Generic[K]):
    """`clock` is monotonic seconds, and the loop's own unless a test gives another."""

    def __init__(
        self,
        limit: int,
        backoff: Backoff,
        clock: Callable[[], float] | None = None,
        random: Random | None = None,
    ) -> None:
        self._limit = limit
        self._backoff = backoff
        self._clock = clock if clock is not None else asyncio.get_running_loop().time
        self._random = random if random is not None else Random()
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._working: set[K] = set()
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()
        self.refused = 0

    def __len__(self) -> int:
        """Keys that wait, not those being worked on."""
        return len(self._due)

    def add(self, key: K, delay: float = 0.0) -> bool:
        """Want `key` worked on in `delay` seconds; the earlier time wins. False when the queue is full."""
        due = self._clock() + delay
        known = self._due.get(key)
        if known is not None and known <= due:
            return True
        if known is None and len(self._due) >= self._limit:
            self.refused += 1
            return False
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key))
        self._compact()
        self._changed.set()
        return True

    def take(self) -> K | None:
        """A key that is due and not being worked on; None when there is none now."""
        now, blocked, found = self._clock(), [], None
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            due, _, key = entry
            if self._due.get(key) != due:
                continue  # an earlier time took its place
            if key in self._working:
                blocked.append(entry)
                continue
            del self._due[key]
            self._working.add(key)
            found = key
            break
        for entry in blocked:
            heapq.heappush(self._heap, entry)
        return found

    async def get(self) -> K:
        """Wait for a key. A worker that got one calls `done` in every case."""
        while True:
            self._changed.clear()
            found = self.take()
            if found is not None:
                return found
            pause = self._next_pause()
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: K, *, failed: bool = False) -> float | None:
        """End of work. A failure puts it back after the returned pause; a success forgets failures."""
        self._working.discard(key)
        self._changed.set()
        if not failed:
            self._failures.pop(key, None)
            return None
        count = self._failures[key] = self._failures.get(key, 0) + 1
        pause = self._backoff.pause(count, self._random.random())
        self.add(key, pause)
        return pause

    def forget(self, key: K) -> None:
        """The object is gone: no memory of it stays."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    def _next_pause(self) -> float:
        waiting = [due for key, due in self._due.items() if key not in self._working]
        return min(IDLE_SECONDS, max(0.0, min(waiting) - self._clock())) if waiting else IDLE_SECONDS

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [(due, next(self._order), key) for key, due in self._due.items()]
            heapq.heapify(self._heap)
