"""Whether a lower tier answers, and the asking again while it does not. Used by lower.py.

One failure is no news, and an answer too late for a lookup is none at all: it happens on a busy
machine. A tier has a problem after `FAILURES` in a row, or when its store leaves a server alone.
From the first failure or late answer on the store is asked something cheap, the
longer it fails the more rarely, until it answers: an idle agent notices its loss and its return too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kvist_connector.errors import TierError
from kvist_connector.tiers.envelope import EnvelopeStore

FAILURES: Final = 3
FIRST_SECONDS: Final = 0.5
LONGEST_SECONDS: Final = 16.0


class Answering:
    """Of one tier; all calls on its loop."""

    def __init__(
        self, store: EnvelopeStore, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        self._store = store
        self._sleep = sleep
        self._row = 0
        self._why = ""
        self._asking: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()  # the next time
        self._closed = False

    @property
    def problem(self) -> str:
        """Why nothing can be had there now; empty while the tier answers."""
        return self._store.inner.problem or (self._why if self._row >= FAILURES else "")

    @property
    def asking(self) -> bool:
        """Whether the tier is being asked again."""
        return self._asking is not None

    def worked(self) -> None:
        """The store answered; that it lacks a chunk or has no room for one is an answer."""
        self._row = 0

    def failed(self, error: Exception) -> None:
        """It did not."""
        self._row, self._why = self._row + 1, str(error)
        self.doubted()

    def doubted(self) -> None:
        """Nothing is known of it: it is asked."""
        # One that is done has not been noted yet, and will not ask about this failure.
        if (self._asking is None or self._asking.done()) and not self._closed:
            self._asking = asyncio.get_running_loop().create_task(self._ask_again())
            self._asking.add_done_callback(self._ended)

    async def asked(self) -> None:
        """Return when it has been asked the next time; at once while it is not being asked."""
        if self._asking is not None:
            await self._asked.wait()

    async def close(self) -> None:
        """No more questions, though what was begun before may still fail."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def _ask_again(self) -> None:
        pause = FIRST_SECONDS
        while True:
            await self._sleep(pause)
            pause = min(2 * pause, LONGEST_SECONDS)
            try:
                await self._store.inner.probe()
            except TierError as error:
                self._row, self._why = self._row + 1, str(error)
            else:
                self.worked()
                if not self._store.inner.problem:
                    return
            self._tell()

    def _tell(self) -> None:
        self._asked.set()
        self._asked = asyncio.Event()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._asking is task:
            self._asking = None
        self._tell()
        if not task.cancelled():
            task.result()
