"""A store that fails when told to, for tests of everything above it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvist_connector.errors import TierError
from kvist_connector.tiers.base import Buffer, ChunkStore, Read
from kvist_connector.tiers.wrapper import WrapperStore

Plan = Callable[[str, bytes], Exception | None]


class FaultyStore(WrapperStore):
    """`plan(operation, key)` returns the error to raise, or None. `gate` holds every call while cleared."""

    def __init__(self, inner: ChunkStore, plan: Plan = lambda operation, key: None) -> None:
        super().__init__(inner)
        self.plan = plan
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[tuple[str, bytes]] = []

    async def probe(self) -> None:
        """Fails as planned for questions."""
        await ChunkStore.probe(self)

    async def get(self, read: Read) -> int | None:
        """Fails as planned."""
        await self._pass("get", read.key)
        return await self.inner.get(read)

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """Fails as planned, as a whole."""
        try:
            for key in keys:
                await self._pass("ask", key)
        except TierError as error:
            return [error] * len(keys)
        return await self.inner.sizes(keys)

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """Fails as planned."""
        await self._pass("put", key)
        return await self.inner.put_if_absent(key, parts)

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """In steps, each of which fails as planned."""
        return await ChunkStore.replace(self, key, seen, parts)

    async def delete(self, key: bytes) -> bool:
        """Fails as planned."""
        await self._pass("delete", key)
        return await self.inner.delete(key)

    async def _pass(self, operation: str, key: bytes) -> None:
        self.calls.append((operation, key))
        await self.gate.wait()
        error = self.plan(operation, key)
        if error is not None:
            raise error
