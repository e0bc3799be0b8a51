"""Several stores as one: each key has its place by rendezvous hashing.

The place of a key is the store for which hash(store's name, key) is greatest: adding or
removing a store moves only the keys that it gains or had, and agents need not agree on an
order. A store that fails takes its own keys with it and no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import xxhash

from kvist_connector.tiers.base import Buffer, Capabilities, Capacity, ChunkStore, Item, Read


class SpreadStore(ChunkStore):
    """`stores` by a name that stays when the rest of an address changes; at least one."""

    def __init__(self, stores: Mapping[str, ChunkStore]) -> None:
        if not stores:
            raise ValueError("at least one store is needed")
        self._stores = {name.encode(): store for name, store in stores.items()}

    @property
    def capabilities(self) -> Capabilities:
        """What all of them have."""
        found = [store.capabilities for store in self._stores.values()]
        limits = [each.largest for each in found if each.largest is not None]
        return Capabilities(
            persistent=all(each.persistent for each in found),
            shared=all(each.shared for each in found),
            listable=all(each.listable for each in found),
            largest=min(limits, default=None),
            writable=all(each.writable for each in found),
        )

    @property
    def problem(self) -> str:
        """Of the first one that has any."""
        return next((store.problem for store in self._stores.values() if store.problem), "")

    async def probe(self) -> None:
        """See ChunkStore; all are asked whatever one of them says."""
        found = await asyncio.gather(
            *(store.probe() for store in self._stores.values()), return_exceptions=True
        )
        for error in found:
            if error is not None:
                raise error

    async def get(self, read: Read) -> int | None:
        """See ChunkStore."""
        return await self._of(read.key).get(read)

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """See ChunkStore; the stores are asked at the same time."""
        places: dict[ChunkStore, list[int]] = {}
        for position, key in enumerate(keys):
            places.setdefault(self._of(key), []).append(position)
        answers = await asyncio.gather(
            *(store.sizes([keys[position] for position in own]) for store, own in places.items())
        )
        found: list[int | Exception | None] = [None] * len(keys)
        for own, answer in zip(places.values(), answers, strict=True):
            for position, size in zip(own, answer, strict=True):
                found[position] = size
        return found

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore."""
        return await self._of(key).put_if_absent(key, parts)

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore."""
        return await self._of(key).replace(key, seen, parts)

    async def delete(self, key: bytes) -> bool:
        """See ChunkStore."""
        return await self._of(key).delete(key)

    async def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """See ChunkStore."""
        for store in self._stores.values():
            async for item in store.items(prefix):
                yield item

    async def capacity(self) -> Capacity:
        """The sum; no limit when one of them has none."""
        found = await asyncio.gather(*(store.capacity() for store in self._stores.values()))
        limits = [each.limit for each in found if each.limit is not None]
        whole = sum(limits) if len(limits) == len(found) else None
        return Capacity(sum(each.used for each in found), whole)

    async def close(self) -> None:
        """See ChunkStore."""
        for store in self._stores.values():
            await store.close()

    def _of(self, key: bytes) -> ChunkStore:
        place = max(self._stores, key=lambda name: (xxhash.xxh3_64_intdigest(name + key), name))
        return self._stores[place]
