"""Base of wrappers: a store that hands everything on, for subclasses to change one thing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvist_connector.tiers.base import Buffer, Capabilities, Capacity, ChunkStore, Item, Read


class WrapperStore(ChunkStore):
    """Delegates to `inner`."""

    def __init__(self, inner: ChunkStore) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """Of the inner store."""
        return self.inner.capabilities

    @property
    def problem(self) -> str:
        """Of the inner store."""
        return self.inner.problem

    async def probe(self) -> None:
        """See ChunkStore."""
        await self.inner.probe()

    async def get(self, read: Read) -> int | None:
        """See ChunkStore."""
        return await self.inner.get(read)

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """See ChunkStore."""
        return await self.inner.sizes(keys)

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore."""
        return await self.inner.put_if_absent(key, parts)

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore."""
        return await self.inner.replace(key, seen, parts)

    async def delete(self, key: bytes) -> bool:
        """See ChunkStore."""
        return await self.inner.delete(key)

    def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """See ChunkStore."""
        return self.inner.items(prefix)

    async def capacity(self) -> Capacity:
        """See ChunkStore."""
        return await self.inner.capacity()

    async def close(self) -> None:
        """See ChunkStore."""
        await self.inner.close()


def innermost(store: ChunkStore) -> ChunkStore:
    """The store inside all wrappers."""
    while isinstance(store, WrapperStore):
        store = store.inner
    return store
