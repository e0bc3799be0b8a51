"""Counts and times the operations of any store."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvist_connector.tiers.base import Buffer, ChunkStore, Read, total_bytes
from kvist_connector.tiers.wrapper import WrapperStore

R = TypeVar("R")


# Where the figures go: operation, outcome (ok, miss, present or the error's class name), bytes, seconds.
Meter = Callable[[str, str, int, float], None]


class MeteredStore(WrapperStore):
    """See module."""

    def __init__(
        self, inner: ChunkStore, meter: Meter, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(inner)
        self._meter = meter
        self._clock = clock

    async def get(self, read: Read) -> int | None:
        """Bytes count only for hits."""
        return await self._timed("get", self.inner.get(read), _judge_get)

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """One figure a batch: hit when its first key is there."""
        return await self._timed("ask", self.inner.sizes(keys), _judge_ask)

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """Bytes count only when written."""
        size = total_bytes(parts)
        return await self._timed(
            "put", self.inner.put_if_absent(key, parts), lambda done: ("ok", size) if done else ("present", 0)
        )

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """Bytes count only when written."""
        size = total_bytes(parts)
        work = self.inner.replace(key, seen, parts)
        return await self._timed("replace", work, lambda done: ("ok", size) if done else ("changed", 0))

    async def delete(self, key: bytes) -> bool:
        """Deletions carry no bytes."""
        return await self._timed("delete", self.inner.delete(key), lambda done: ("ok" if done else "miss", 0))

    async def _timed(self, operation: str, work: Awaitable[R], judge: Callable[[R], tuple[str, int]]) -> R:
        start = self._clock()
        outcome, size = "cancelled", 0
        try:
            result = await work
            outcome, size = judge(result)
            return result
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self._meter(operation, outcome, size, self._clock() - start)


def _judge_get(found: int | None) -> tuple[str, int]:
    return ("miss", 0) if found is None else ("ok", found)


def _judge_ask(found: list[int | Exception | None]) -> tuple[str, int]:
    failed = next((item for item in found if isinstance(item, Exception)), None)
    if failed is not None:
        return type(failed).__name__, 0
    return ("ok" if found and found[0] is not None else "miss"), 0
