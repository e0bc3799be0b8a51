"""A time limit and a breaker around any store.

After `failures` failures in a row every call fails at once for `pause` seconds, then one call
probes. A store that cannot let go of the buffers (a thread in a hung file system) returns
late in spite of the limit; the breaker keeps others from piling up behind it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.tiers.base import Buffer, ChunkStore, Read
from kvist_connector.tiers.wrapper import WrapperStore

R = TypeVar("R")


class DeadlineStore(WrapperStore):
    """See module. Seconds throughout."""

    def __init__(
        self,
        inner: ChunkStore,
        limit: float,
        failures: int = 5,
        pause: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._limit = limit
        self._most = failures
        self._pause = pause
        self._clock = clock
        self._failed = 0
        self._closed_until = 0.0

    @property
    def open(self) -> bool:
        """Whether calls fail at once."""
        return self._failed >= self._most and self._clock() < self._closed_until

    async def get(self, read: Read) -> int | None:
        """TierError when too slow or while the breaker is open."""
        return await self._limited(lambda: self.inner.get(read))

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """TierError when too slow or while the breaker is open."""
        return await self._limited(lambda: self.inner.put_if_absent(key, parts))

    async def delete(self, key: bytes) -> bool:
        """TierError when too slow or while the breaker is open."""
        return await self._limited(lambda: self.inner.delete(key))

    async def _limited(self, work: Callable[[], Awaitable[R]]) -> R:
        if self.open:
            raise TierError(f"tier is paused after {self._failed} failures in a row")
        if self._failed >= self._most:
            self._closed_until = self._clock() + self._pause  # this call probes, the others still fail
        try:
            async with asyncio.timeout(self._limit):
                result = await work()
        except StorageFull:
            self._failed = 0
            raise
        except TimeoutError as error:
            self._fail()
            raise TierError(f"no answer within {self._limit} s") from error
        except TierError:
            self._fail()
            raise
        self._failed = 0
        return result

    def _fail(self) -> None:
        self._failed += 1
        self._closed_until = self._clock() + self._pause
