"""A time limit, a limit on concurrency and two breakers around any store.

After `failures` failures in a row every call fails at once for `pause` seconds, then one call
probes. Questions have less time than the store may rightly take: one that comes late says nothing
about the store, it only makes lookups wait. So late ones stop questions, and nothing else. A store
that cannot let go of the buffers (a thread in a hung file system) returns late in spite of the
limit; the breaker keeps others from piling up behind it. Calls that wait for their turn are not
timed: only the store's own slowness counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.tiers.base import Buffer, Capacity, ChunkStore, ElsewhereError, Item, Read
from kvist_connector.tiers.turns import Turns
from kvist_connector.tiers.wrapper import WrapperStore

R = TypeVar("R")


class LateAnswerError(TierError):
    """A question was not answered in the time that a lookup has; the store may be well."""


class DeadlineStore(WrapperStore):
    """See module. Seconds throughout.

    `limit`: of one operation; `ask`: of one question for sizes, by default the same;
    `most`: operations at a time, questions not counted; those that wait go on in rounds (`turns`).
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
        self._operations = _Breaker(failures, pause, clock)
        self._questions = _Breaker(failures, pause, clock)
        self._clock = clock
        self._turn = Turns(most)

    @property
    def open(self) -> bool:
        """Whether calls fail at once."""
        return self._operations.open

    @property
    def problem(self) -> str:
        """The last failure, from the one that opened the breaker until a call succeeds."""
        return self._operations.problem

    async def probe(self) -> None:
        """TierError when too slow for an operation or while the breaker is open."""
        begun = self._clock()
        await self._limited(self.inner.probe)
        if self._clock() - begun <= self._ask:
            self._questions.worked()

    async def get(self, read: Read) -> int | None:
        """TierError when too slow or while the breaker is open."""
        async with self._turn:
            return await self._limited(lambda: self.inner.get(read))

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """TierError for each key while a breaker is open, LateAnswerError when too slow."""
        try:
            found = await self._ask_sizes(keys)
        except (LateAnswerError, _PausedError) as error:
            return [error] * len(keys)
        except TierError as error:
            self._operations.failed(error)
            return [error] * len(keys)
        self._questions.worked()
        failures = [
            item for item in found if isinstance(item, Exception) and not isinstance(item, ElsewhereError)
        ]
        if failures:
            self._operations.failed(failures[0])
        else:
            self._operations.worked()
        return found

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """TierError when too slow or while the breaker is open."""
        async with self._turn:
            return await self._limited(lambda: self.inner.put_if_absent(key, parts))

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """TierError when too slow or while the breaker is open."""
        async with self._turn:
            return await self._limited(lambda: self.inner.replace(key, seen, parts))

    async def delete(self, key: bytes) -> bool:
        """TierError when too slow or while the breaker is open."""
        async with self._turn:
            return await self._limited(lambda: self.inner.delete(key))

    async def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """TierError when one step is too slow or while the breaker is open."""
        found = self.inner.items(prefix)
        while True:
            try:
                item = await self._limited(found.__anext__)
            except StopAsyncIteration:
                return
            yield item

    async def capacity(self) -> Capacity:
        """TierError when too slow or while the breaker is open."""
        return await self._limited(self.inner.capacity)

    async def _ask_sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        self._operations.admit()
        try:
            self._questions.admit()
            async with asyncio.timeout(self._ask):
                return await self.inner.sizes(keys)
        except _PausedError as error:
            raise LateAnswerError(str(error)) from error
        except TimeoutError as error:
            late = LateAnswerError(f"no answer within {self._ask:g} s")
            self._questions.failed(late)
            raise late from error

    async def _limited(self, work: Callable[[], Awaitable[R]]) -> R:
        self._operations.admit()
        try:
            async with asyncio.timeout(self._limit):
                result = await work()
        except (StorageFull, ElsewhereError):
            self._operations.worked()
            raise
        except TimeoutError as error:
            late = TierError(f"no answer within {self._limit:g} s")
            self._operations.failed(late)
            raise late from error
        except TierError as error:
            self._operations.failed(error)
            raise
        self._operations.worked()
        return result


class _PausedError(TierError):
    """The store was not asked."""


class _Breaker:
    """Counts failures in a row."""

    def __init__(self, failures: int, pause: float, clock: Callable[[], float]) -> None:
        self._most = failures
        self._pause = pause
        self._clock = clock
        self._row = 0
        self._cause = ""  # of the last failure
        self._closed_until = 0.0

    @property
    def open(self) -> bool:
        return self._row >= self._most and self._clock() < self._closed_until

    @property
    def problem(self) -> str:
        return self._cause if self._row >= self._most else ""

    def admit(self) -> None:
        """_PausedError while open; after the pause one call is let through, the others still fail."""
        if self.open:
            raise _PausedError(f"tier is paused after {self._most} failures in a row: {self._cause}")
        if self._row >= self._most:
            self._closed_until = self._clock() + self._pause

    def worked(self) -> None:
        self._row = 0

    def failed(self, error: Exception) -> None:
        self._row, self._cause = self._row + 1, str(error)
        self._closed_until = self._clock() + self._pause
