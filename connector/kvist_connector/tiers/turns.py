"""Turns at something that takes so many calls at a time: those who wait go on in rounds.

One call of each of those for whom calls are made, and then again: a request that reads two chunks is
not behind all hundred of another one. Who that is comes from the task that calls (`WORKING_FOR`, set by
the agent's loader); calls of nobody in particular are one more in the round. Used by `deadline`, `hang`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Final

WORKING_FOR: Final[ContextVar[object]] = ContextVar("working_for", default=None)


class Turns:
    """`most` at a time; `async with` is one of them."""

    def __init__(self, most: int) -> None:
        self._free = most
        # In the order of the round: whoever had a turn goes to its end.
        self._waiting: OrderedDict[object, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self) -> None:
        """Return when it is the caller's turn, which ends with `give`; raises what `refuse` made."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(WORKING_FOR.get(), deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self.give()
            raise

    def give(self) -> None:
        """A turn is over."""
        while self._waiting:
            whom, queue = next(iter(self._waiting.items()))
            turn = queue.popleft()
            if queue:
                self._waiting.move_to_end(whom)
            else:
                del self._waiting[whom]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def refuse(self, error: Callable[[], Exception]) -> None:
        """All who wait are turned away, each with an error of its own."""
        for queue in self._waiting.values():
            for turn in queue:
                if not turn.done():
                    turn.set_exception(error())
        self._waiting.clear()

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give()
