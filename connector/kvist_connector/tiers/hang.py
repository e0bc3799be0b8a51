"""Notices that a store's calls do not come back, and keeps everybody else out meanwhile.

Around stores whose calls run in threads: a thread in a hung file system cannot be stopped and may
still write into the buffer it was given, so its caller cannot go on. It waits, and its buffer is
nobody else's; whoever comes later, or waits for its turn, has a TierError at once. When the last such call
has come back the store is used again. Used by `agent.stores` and `agent.own`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from kvist_connector.errors import TierError
from kvist_connector.tiers.base import Buffer, ChunkStore, Item, Read
from kvist_connector.tiers.turns import Turns
from kvist_connector.tiers.wrapper import WrapperStore

R = TypeVar("R")


class HangGuard(WrapperStore):
    """`limit`: seconds after which a call hangs; `most`: calls at a time, as many as there are threads.

    `on_change` is called when the store begins to hang and when it is well again.
    """

    def __init__(self, inner: ChunkStore, limit: float, most: int) -> None:
        super().__init__(inner)
        self.on_change: Callable[[], None] = lambda: None
        self._limit = limit
        self._turns = Turns(most)
        self._hanging: set[object] = set()

    @property
    def hangs(self) -> bool:
        """Whether calls fail at once."""
        return bool(self._hanging)

    @property
    def problem(self) -> str:
        """See ChunkStore."""
        text = f"{len(self._hanging)} calls have not come back after {self._limit:g} s"
        return text if self._hanging else self.inner.problem

    async def probe(self) -> None:
        """TierError while the store hangs."""
        await self._guarded(self.inner.probe)

    async def get(self, read: Read) -> int | None:
        """TierError while the store hangs."""
        return await self._guarded(lambda: self.inner.get(read))

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """TierError for each key while the store hangs."""
        return await self.get_many([Read(key, ()) for key in keys])

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """TierError while the store hangs."""
        return await self._guarded(lambda: self.inner.put_if_absent(key, parts))

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """TierError while the store hangs."""
        return await self._guarded(lambda: self.inner.replace(key, seen, parts))

    async def delete(self, key: bytes) -> bool:
        """TierError while the store hangs."""
        return await self._guarded(lambda: self.inner.delete(key))

    def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """From the books of the store, whatever its files do."""
        return self.inner.items(prefix)

    async def _guarded(self, work: Callable[[], Awaitable[R]]) -> R:
        if self._hanging:  # calls that wait are not timed: a busy store does not hang
            raise TierError(self.problem)
        await self._turns.take()
        call = object()
        timer = asyncio.get_running_loop().call_later(self._limit, self._overdue, call)
        try:
            return await work()
        finally:
            timer.cancel()
            self._ended(call)

    def _overdue(self, call: object) -> None:
        began = not self._hanging
        self._hanging.add(call)
        self._turns.refuse(lambda: TierError(self.problem))
        if began:
            self.on_change()

    def _ended(self, call: object) -> None:
        hung = call in self._hanging
        self._hanging.discard(call)
        self._turns.give()
        if hung and not self._hanging:
            self.on_change()


def guard_of(store: ChunkStore) -> HangGuard | None:
    """The guard among a store's wrappers."""
    while isinstance(store, WrapperStore):
        if isinstance(store, HangGuard):
            return store
        store = store.inner
    return None
