"""Chunks in another agent's arena, to be read and nothing else.

One store is one peer; `anyone.AnyoneStore` makes one of several. How bytes move is a Transfer's
(HTTP: peer_http.py): names are asked for in batches, objects read one at a time into the caller's
buffers. A peer evicts as it likes: what it had a moment ago may be a miss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from kvist_connector.errors import TierError
from kvist_connector.protocol.peer import MAX_NAMES
from kvist_connector.tiers.base import Buffer, Capabilities, Capacity, ChunkStore, Item, Read


class Transfer(ABC):
    """How one peer is asked and read. Failures are TierError, and name the peer.

    A call that ends, by cancellation too, no longer touches the buffers it was given.
    """

    @abstractmethod
    async def sizes(self, names: Sequence[bytes]) -> Sequence[int | None]:
        """Bytes of each object, None for a miss; at most MAX_NAMES names."""

    @abstractmethod
    async def read(self, read: Read) -> int | None:
        """As ChunkStore.get."""

    @abstractmethod
    async def give(self, take: bytes) -> bytes:
        """Ask the peer to take chunks from somebody; body and answer in JSON, see protocol/peer.py."""

    @abstractmethod
    async def close(self) -> None:
        """End connections."""


class ReadOnlyStore(ChunkStore):
    """What all stores over others' arenas have in common: they are read, and nothing else."""

    @property
    def capabilities(self) -> Capabilities:
        """Every agent's, and not ours to change."""
        return Capabilities(persistent=False, shared=True, listable=False, writable=False)

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """Refused: a peer's arena is its own."""
        raise TierError("a peer's arena can only be read")

    async def delete(self, key: bytes) -> bool:
        """Nothing is deleted."""
        return False

    async def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """Nothing is listed."""
        return
        yield

    async def capacity(self) -> Capacity:
        """None of it is ours."""
        return Capacity(0, None)


class PeerStore(ReadOnlyStore):
    """See module."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    async def get(self, read: Read) -> int | None:
        """See ChunkStore."""
        return await self._transfer.read(read)

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """See ChunkStore."""
        found: list[int | Exception | None] = []
        for start in range(0, len(keys), MAX_NAMES):
            batch = keys[start : start + MAX_NAMES]
            try:
                found += await self._transfer.sizes(batch)
            except TierError as error:
                found += [error] * len(batch)
        return found

    async def close(self) -> None:
        """See ChunkStore."""
        await self._transfer.close()
