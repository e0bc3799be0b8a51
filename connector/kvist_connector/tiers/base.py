"""The contract of a backend that stores chunks: objects of bytes under short binary keys.

Implemented by disk, redis, object_store and peer; wrapped by spread, anyone, metered, deadline
and faulty; called only through `envelope.EnvelopeStore`, which gives the bytes meaning. The
conformance suite is `kvist_connector.testing.chunk_store.ChunkStoreSuite`.

A key is the chunk's 16 bytes, in shared stores after a scope of at most 16 bytes: the model
state whose objects are listed and cleared together.

All calls are safe to make concurrently on one event loop. A miss is None, a failure is
TierError, no room is StorageFull. An object is visible whole or not at all. A call that ends,
by cancellation too, no longer touches the buffers it was given.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import overload

from kvist_connector.errors import TierError

Buffer = bytes | bytearray | memoryview
_NOBODYS = bytes(16)  # as likely the key of a chunk as any other


@dataclass(frozen=True)
class Capabilities:
    """What callers may rely on."""

    persistent: bool  # objects outlive this process
    shared: bool  # other agents see and add objects
    listable: bool  # `items` is complete
    largest: int | None = None  # most bytes of one object; None: no limit of its own
    writable: bool = True  # otherwise nothing is stored, and deleting does nothing
    seals: bool = False  # writes `Sealed` parts in one pass


@dataclass(frozen=True)
class Capacity:
    """Bytes used, and the limit that the backend itself enforces (None: it has none)."""

    used: int
    limit: int | None


@dataclass(frozen=True)
class Item:
    """One stored object."""

    key: bytes
    size: int


@dataclass(frozen=True)
class Read:
    """One read of a batch: fill the buffers in turn with the object's first bytes.

    A store that has them piece by piece may tell `seen` of each, in order, once it is in its buffer, from
    any thread; a store need not.
    """

    key: bytes
    into: Sequence[memoryview]
    seen: Callable[[memoryview], None] | None = None


class Sealed(Sequence[Buffer]):
    """Parts of one write, whose first is made from the others: it has their checksum.

    A store that `seals` tells `see` of each piece of the body, in order and in the thread that writes it, and
    then asks for the `head`: one pass over memory. `see` may also be told nothing.
    """

    def __init__(
        self,
        size: int,
        body: Sequence[Buffer],
        see: Callable[[memoryview], None],
        seal: Callable[[], bytes],
    ) -> None:
        self.head_bytes = size
        self.body = [memoryview(part).cast("B") for part in body if total_bytes([part])]
        self._left = total_bytes(self.body)
        self.nbytes = size + self._left
        self._see = see
        self._seal = seal
        self._head = b""

    def see(self, piece: memoryview) -> None:
        """What comes next of the body."""
        self._see(piece)
        self._left -= piece.nbytes

    @property
    def head(self) -> bytes:
        """The first part. What has not been seen of the body by now is looked at."""
        if not self._head:
            seen = total_bytes(self.body) - self._left
            for view in self.body:
                if seen < view.nbytes:
                    self.see(view[seen:])
                seen = max(0, seen - view.nbytes)
            self._head = self._seal()
        return self._head

    def __len__(self) -> int:
        return 1 + len(self.body)

    @overload
    def __getitem__(self, index: int) -> Buffer: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Buffer]: ...

    def __getitem__(self, index: int | slice) -> Buffer | Sequence[Buffer]:
        parts: list[Buffer] = [self.head, *self.body]
        return parts[index]


class ElsewhereError(TierError):
    """Another one of a group of servers has this key now: an answer, not a failure of the one asked."""


class ChunkStore(ABC):
    """A backend. `get` and `put_if_absent` are the minimum; batches default to concurrency."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Constant over the store's life."""

    @property
    def problem(self) -> str:
        """Why a server is left alone now; empty while all are asked."""
        return ""

    async def probe(self) -> None:
        """Ask every server something cheap; TierError when one does not answer."""
        (answer,) = await self.sizes([_NOBODYS])
        if isinstance(answer, Exception):
            raise answer

    @abstractmethod
    async def get(self, read: Read) -> int | None:
        """Fill the buffers and return the object's whole length; None when there is no such object.

        A shorter object leaves the rest of the buffers undefined, a longer one is cut: the
        caller compares lengths.
        """

    async def get_many(self, reads: Sequence[Read]) -> list[int | Exception | None]:
        """One result a read, in order; failures are returned, not raised."""
        results = await asyncio.gather(*(self.get(read) for read in reads), return_exceptions=True)
        return [_as_result(result) for result in results]

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """Length of each object, None for a miss, without reading it; failures are returned, not raised."""
        return await self.get_many([Read(key, ()) for key in keys])

    @abstractmethod
    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """Store the concatenated parts; false when the key was there already (it stays as it is)."""

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """Store the parts in the place of an object that begins with `seen`.

        False when it does not, or is not there: then nothing changes. Shared stores do it at once; in steps,
        as here, only one process may write, and its death in between leaves no object.
        """
        head = bytearray(len(seen))
        if await self.get(Read(key, [memoryview(head)])) is None or head != seen:
            return False
        await self.delete(key)
        return await self.put_if_absent(key, parts)

    @abstractmethod
    async def delete(self, key: bytes) -> bool:
        """Remove the object; false when there was none."""

    @abstractmethod
    def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """Every object whose key begins with the prefix, in no order.

        Objects added or removed meanwhile may or may not appear.
        """

    @abstractmethod
    async def capacity(self) -> Capacity:
        """Bytes used and limit."""

    @abstractmethod
    async def close(self) -> None:
        """Release what the store holds; stored objects stay."""


def total_bytes(parts: Sequence[Buffer]) -> int:
    """Length of the concatenated parts."""
    if isinstance(parts, Sealed):
        return parts.nbytes
    return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)


def _as_result(result: int | BaseException | None) -> int | Exception | None:
    if isinstance(result, BaseException) and not isinstance(result, Exception):
        raise result
    return result
