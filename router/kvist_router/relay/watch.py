"""Ends a request whose client is gone or where nothing moves any more. Called by relay/app.py.

Waiting for the client's disconnect happens in a task beside the handler, in all modes: without it
a request that does not stream would run on in the engine. The handler's task is cancelled and
finds the reason here.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Literal

from starlette.types import Receive

Reason = Literal["", "client gone", "no progress"]


class Watch:
    """`async with Watch(...)` around everything after the body was read."""

    def __init__(self, receive: Receive, idle_seconds: float) -> None:
        self.reason: Reason = ""
        self._receive = receive
        self._idle = idle_seconds
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._beat = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Watch:
        self._watcher = asyncio.create_task(self._disconnect())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(error, asyncio.CancelledError) and self.reason and self._task is not None:
            # Swallow our own cancellation only; one from outside (shutdown) stays.
            return self._task.uncancel() == 0
        return False

    def beat(self) -> None:
        """Something moved: a piece came or went. The first call starts the idle deadline."""
        self._beat = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._idle, self._check)

    def _check(self) -> None:
        left = self._beat + self._idle - self._loop.time()
        if left <= 0:
            self._stop("no progress")
        else:
            self._timer = self._loop.call_later(left, self._check)

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
