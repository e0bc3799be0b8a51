"""Ends a request whose client is gone, or one that is over a deadline. Called by relay/app.py.

One timer for all requests looks at their deadlines; a request that lives longer than a tick also
gets a task that waits for its client's disconnect, in all modes: without it a request that does not
stream would run on in the engine. Most of the cost of timers and tasks is so spared to requests
that are over at once. The handler's task is cancelled and finds the reason here.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Literal

from starlette.types import Receive

TICK_SECONDS = 0.05

Reason = Literal["", "client gone", "body", "decision", "first byte", "no progress"]
Phase = Literal["body", "decision", "first byte", "no progress"]


class Watchdog:
    """Holds the watches of all running requests."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._watches)

    def watch(self, receive: Receive) -> Watch:
        """For the current task; use it as a context."""
        return Watch(self, receive)

    def add(self, watch: Watch) -> None:
        """Look after a request."""
        self._watches.add(watch)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def remove(self, watch: Watch) -> None:
        """The request is over."""
        self._watches.discard(watch)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for watch in tuple(self._watches):
            watch.check(now)
        self._timer = loop.call_later(TICK_SECONDS, self._tick) if self._watches else None


class Watch:
    """One request: `phase` sets what it waits for and how long that may take from now."""

    def __init__(self, dog: Watchdog, receive: Receive) -> None:
        self.reason: Reason = ""
        self._dog = dog
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._phase: Phase = "body"
        self._deadline = float("inf")
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Watch:
        self._dog.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._dog.remove(self)
        if self._watcher is not None:
            self._watcher.cancel()
        if isinstance(error, asyncio.CancelledError) and self.reason and self._task is not None:
            # Swallow our own cancellation only; one from outside (shutdown) stays.
            return self._task.uncancel() == 0
        return False

    def phase(self, phase: Phase, seconds: float) -> None:
        """What is waited for now; `no progress` again for every piece that came or went."""
        self._phase = phase
        self._deadline = self._loop.time() + seconds

    def check(self, now: float) -> None:
        """Called by the watchdog on every tick."""
        if now >= self._deadline:
            self._stop(self._phase)
        elif self._watcher is None and self._phase != "body":  # until then the handler itself receives
            self._watcher = asyncio.create_task(self._disconnect())

    async def _disconnect(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._stop("client gone")
                return

    def _stop(self, reason: Reason) -> None:
        if not self.reason and self._task is not None:
            self.reason = reason
            self._task.cancel()
