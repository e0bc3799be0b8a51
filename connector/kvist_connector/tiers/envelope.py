"""Identity and integrity of stored chunks: 4 KiB of header, then the bytes of every rank.

The header is `header`'s; how the bytes are stored is `coding`'s. Every read checks magic, format,
fingerprint, key, lengths and xxh3 of the body; what does not match is an IntegrityError that
names it.
In shared stores the object's key is the chunk's after the first bytes of the fingerprint, so
that the chunks of one model can be listed and cleared.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor

import msgspec

from kvist_connector.errors import IntegrityError, TierError
from kvist_connector.keys import KEY_BYTES
from kvist_connector.protocol.engine import Values
from kvist_connector.tiers.base import Buffer, ChunkStore, Item, Read, total_bytes
from kvist_connector.tiers.coding import Coding, Compression
from kvist_connector.tiers.header import (
    HEADER_BYTES,
    SEAL_BYTES,
    ForeignChunk,
    Header,
    LockedChunk,
    LossyChunk,
    mark_of,
    pack_header,
    unpack_header,
)
from kvist_connector.tiers.running import RunningChecksum, sealed

__all__ = [
    "HEADER_BYTES",
    "SCOPE_BYTES",
    "EnvelopeStore",
    "ForeignChunk",
    "Header",
    "LockedChunk",
    "LossyChunk",
]

_SCAN_BATCH = 64
SCOPE_BYTES = 16


class EnvelopeStore:
    """A store of chunks, as the agent uses it, over any `ChunkStore`."""

    def __init__(self, inner: ChunkStore, threads: Executor, coding: Coding | None = None) -> None:
        self.inner = inner
        self._threads = threads
        self._coding = coding or Coding()
        self._scoped = inner.capabilities.shared

    @property
    def coding(self) -> Coding:
        """How its chunks are stored, and what was measured of that."""
        return self._coding

    def describe(self, values: Values) -> None:
        """What the bytes of the chunks mean from now on."""
        self._coding.values = values

    @property
    def largest(self) -> int | None:
        """Most bytes of a chunk; None: no limit."""
        limit = self.inner.capabilities.largest
        limits = [self._coding.largest, None if limit is None else limit - self.stored_at_most(0)]
        return min((found for found in limits if found is not None), default=None)

    def stored_at_most(self, raw: int) -> int:
        """Bytes that a chunk of `raw` bytes takes as this agent stores it, when it does not shrink."""
        return HEADER_BYTES + raw + self._coding.extra_bytes

    def plausible(self, size: int, raw: int) -> bool:
        """Whether an object of this size may be a chunk of `raw` bytes, whoever stored it."""
        return HEADER_BYTES < size <= HEADER_BYTES + raw + SEAL_BYTES

    async def get(self, fingerprint: bytes, key: bytes, into: Sequence[memoryview]) -> Header | None:
        """Fill the buffers with the chunk's bytes, verified; None when it is not stored."""
        head, tail = bytearray(HEADER_BYTES), bytearray(self._coding.extra_bytes)
        views = [*into, memoryview(tail)]
        start = self._coding.clock()
        seen = RunningChecksum()
        length = await self.inner.get(Read(self.name(fingerprint, key), [memoryview(head), *views], seen))
        if length is None:
            return None
        header = _expect(head, length, key)
        if header.fingerprint != fingerprint:
            raise ForeignChunk(f"chunk {key.hex()} has another fingerprint")
        if header.raw_bytes != total_bytes(into):
            raise ForeignChunk(
                f"chunk {key.hex()} has {header.raw_bytes} bytes, expected {total_bytes(into)}"
            )
        try:
            self._coding.refuse(header)
            await self._decode(header, views, into, seen.of(header.stored_bytes))
        except IntegrityError as error:
            raise type(error)(f"chunk {key.hex()}: {error}") from error
        self._coding.was_read(header, self._coding.clock() - start)
        return header

    async def _decode(
        self, header: Header, views: Sequence[memoryview], into: Sequence[memoryview], digest: bytes | None
    ) -> None:
        if digest is not None and not header.codec and not header.key_id:
            self._coding.decode(header, views, into, digest)  # nothing is left to do
            return
        await asyncio.get_running_loop().run_in_executor(
            self._threads, self._coding.decode, header, views, into, digest
        )

    async def put_if_absent(
        self,
        parts: Sequence[Buffer],
        *,
        fingerprint: bytes,
        key: bytes,
        parent: bytes,
        index: int,
        tags: tuple[str, ...] = (),
        retire_epoch: int = 0,
        lossy: bool = False,
        instead: Header | None = None,
    ) -> bool:
        """Store a chunk; false when it was stored before.

        `instead`: in the place of one that is stored as this says; false when none is (any more).
        """
        size = total_bytes(parts)
        plain = Header(
            fingerprint=fingerprint,
            key=key,
            parent=parent,
            index=index,
            ranks=len(parts),
            raw_bytes=size,
            stored_bytes=size,
            checksum=b"",
            tags=tags,
            retire_epoch=retire_epoch,
            lossy=lossy,
        )
        header, stored = await self._stored(plain, parts)
        start = self._coding.clock()
        name = self.name(fingerprint, key)
        if instead is None:
            written = await self.inner.put_if_absent(name, stored)
        else:
            written = await self.inner.replace(name, mark_of(instead), stored)
        if written:
            self._coding.was_written(header.stored_bytes, self._coding.clock() - start)
        return written

    async def _stored(self, plain: Header, parts: Sequence[Buffer]) -> tuple[Header, Sequence[Buffer]]:
        """The header, and what is written; the header lacks its checksum where that is taken by writing."""
        seals = self.inner.capabilities.seals
        if seals and not self._coding.changes:
            header, body = self._coding.shape(plain, parts)
        else:
            work = self._coding.shape if seals else self._coding.encode
            loop = asyncio.get_running_loop()
            header, body = await loop.run_in_executor(self._threads, work, plain, parts)
        return header, sealed(header, body) if seals else [pack_header(header), *body]

    async def header(self, fingerprint: bytes, key: bytes) -> Header | None:
        """How a chunk is stored; None when it is not."""
        head = bytearray(HEADER_BYTES)
        length = await self.inner.get(Read(self.name(fingerprint, key), [memoryview(head)]))
        return None if length is None else _expect(head, length, key)

    async def rewrite(self, header: Header, parts: Sequence[Buffer], compression: Compression) -> Header:
        """Store the bytes of a chunk that is stored as `header` says anew; how it is stored then.

        Nothing is written when that changes nothing, or when another agent stores it meanwhile. A
        failure may leave it not stored.
        """
        plain = msgspec.structs.replace(
            header, codec="", key_id="", stored_bytes=header.raw_bytes, checksum=b""
        )
        changed, body = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._coding.encode, plain, parts, compression
        )
        if changed.codec == header.codec:
            return header
        name = self.name(header.fingerprint, header.key)
        written = await self.inner.replace(name, mark_of(header), [pack_header(changed), *body])
        return changed if written else header

    async def sizes(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """Stored length of each chunk, None for a miss; failures are returned, not raised."""
        return await self.inner.sizes([self.name(fingerprint, key) for key in keys])

    async def delete(self, fingerprint: bytes, key: bytes) -> bool:
        """Remove the chunk; false when there was none."""
        return await self.inner.delete(self.name(fingerprint, key))

    def objects(self, fingerprint: bytes) -> AsyncIterator[Item]:
        """What a shared store holds of this fingerprint, under the store's own keys."""
        return self.inner.items(fingerprint[:SCOPE_BYTES])

    async def scan(self) -> AsyncIterator[tuple[bytes, int, Header | IntegrityError]]:
        """Key, stored size and header of every object, or what is wrong with it."""
        batch: list[bytes] = []
        async for item in self.inner.items():
            batch.append(item.key)
            if len(batch) == _SCAN_BATCH:
                for found in await self.heads(batch):
                    yield found
                batch.clear()
        for found in await self.heads(batch):
            yield found

    def name(self, fingerprint: bytes, key: bytes) -> bytes:
        """What the store calls the chunk."""
        return fingerprint[:SCOPE_BYTES] + key if self._scoped else key

    async def heads(self, names: Sequence[bytes]) -> list[tuple[bytes, int, Header | IntegrityError]]:
        """Chunk's key, size and header of what the store calls so; what vanished or fails is left out."""
        heads = [bytearray(HEADER_BYTES) for _ in names]
        lengths = await self.inner.get_many(
            [Read(name, [memoryview(head)]) for name, head in zip(names, heads, strict=True)]
        )
        found: list[tuple[bytes, int, Header | IntegrityError]] = []
        for name, head, length in zip(names, heads, lengths, strict=True):
            key = name[-KEY_BYTES:]
            if isinstance(length, Exception) and not isinstance(length, TierError):
                raise length
            if isinstance(length, int):
                try:
                    found.append((key, length, _expect(head, length, key)))
                except IntegrityError as error:
                    found.append((key, length, error))
        return found


def _expect(head: bytearray, length: int, key: bytes) -> Header:
    if length < HEADER_BYTES:
        raise IntegrityError(f"chunk {key.hex()} is cut to {length} bytes")
    header = unpack_header(head)
    if header.key != key:
        raise IntegrityError(f"chunk {key.hex()} holds the bytes of chunk {header.key.hex()}")
    if length != HEADER_BYTES + header.stored_bytes:
        raise IntegrityError(
            f"chunk {key.hex()} has {length} bytes, its header says {HEADER_BYTES + header.stored_bytes}"
        )
    return header
