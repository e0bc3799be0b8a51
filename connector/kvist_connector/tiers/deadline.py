"""A time limit, a limit on concurrency and a breaker around any store.

After `failures` failures in a row every call fails at once for `pause` seconds, then one call
probes. A store that cannot let go of the buffers (a thread in a hung file system) returns
late in spite of the limit; the breaker keeps others from piling up behind it. Calls that
wait for their turn are not timed: only the store's own slowness counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.tiers.base import Buffer, Capacity, ChunkStore, Item, Read
from kvist_connector.tiers.wrapper import WrapperStore

R = TypeVar("R")


class DeadlineStore(WrapperStore):
    """See module. Seconds throughout.

    `limit`: of one operation; `ask`: of one question for sizes, by default the same;
    `most`: operations at a time, questions not counted.
    """

    def __init__(
        self,
        inner: ChunkStore,
        limit: float,
        failures: int = 5,
        pause: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        ask: float | None = None,
        most: int = 1024,
    ) -> None:
        super().__init__(inner)
        self._limit = limit
        self._ask = limit if ask is None else ask
        self._most = failures
        self._pause = pause
        self._clock = clock
        self._failed = 0
        self._cause = ""  # of the last failure
        self._closed_until = 0.0
        self._turn = asyncio.Semaphore(most)

    @property
    def open(self) -> bool:
        """Whether calls fail at once."""
        return self._failed >= self._most and self._clock() < self._closed_until

    @property
    def problem(self) -> str:
        """The last failure, from the one that opened the breaker until a call succeeds."""
        return self._cause if self._failed >= self._most else ""

    async def probe(self) -> None:
        """TierError when too slow for a question or while the breaker is open."""
        await self._limited(self._ask, self.inner.probe)

    async def get(self, read: Read) -> int | None:
        """TierError when too slow or while the breaker is open."""
        async with self._turn:
            return await self._limited(self._limit, lambda: self.inner.get(read))

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """TierError for each key when too slow or while the breaker is open."""
        try:
            return await self._limited(self._ask, lambda: _whole(self.inner.sizes(keys)))
        except _PartlyError as error:
            return error.found
        except TierError as error:
            return [error] * len(keys)

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """TierError when too slow or while the breaker is open."""
        async with self._turn:
            return await self._limited(self._limit, lambda: self.inner.put_if_absent(key, parts))

    async def delete(self, key: bytes) -> bool:
        """TierError when too slow or while the breaker is open."""
        async with self._turn:
            return await self._limited(self._limit, lambda: self.inner.delete(key))

    async def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """TierError when one step is too slow or while the breaker is open."""
        found = self.inner.items(prefix)
        while True:
            try:
                item = await self._limited(self._limit, found.__anext__)
            except StopAsyncIteration:
                return
            yield item

    async def capacity(self) -> Capacity:
        """TierError when too slow or while the breaker is open."""
        return await self._limited(self._limit, self.inner.capacity)

    async def _limited(self, limit: float, work: Callable[[], Awaitable[R]]) -> R:
        if self.open:
            raise TierError(f"tier is paused after {self._most} failures in a row: {self._cause}")
        if self._failed >= self._most:
            self._closed_until = self._clock() + self._pause  # this call probes, the others still fail
        try:
            async with asyncio.timeout(limit):
                result = await work()
        except StorageFull:
            self._failed = 0
            raise
        except TimeoutError as error:
            late = TierError(f"no answer within {limit:g} s")
            self._fail(late)
            raise late from error
        except TierError as error:
            self._fail(error)
            raise
        self._failed = 0
        return result

    def _fail(self, error: TierError) -> None:
        self._failed, self._cause = self._failed + 1, str(error)
        self._closed_until = self._clock() + self._pause


class _PartlyError(TierError):
    """Some keys could be asked for and some not: a failure for the breaker, answers for the caller."""

    def __init__(self, found: list[int | Exception | None]) -> None:
        super().__init__("some keys could not be asked for")
        self.found = found


async def _whole(asked: Awaitable[list[int | Exception | None]]) -> list[int | Exception | None]:
    found = await asked
    if any(isinstance(item, Exception) for item in found):
        raise _PartlyError(found)
    return found
