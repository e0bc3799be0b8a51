"""Identity and integrity of stored chunks: 4 KiB of header, then the bytes of every rank.

    magic "KVISTCNK" | u32 format | u32 header bytes | xxh3 of the header's msgpack | length | msgpack

The header is complete from format 1 (codec, encryption key id, tags, retire epoch are reserved
in it), so later features need no new format. Every read checks magic, format, fingerprint,
key, lengths and xxh3 of the body; what does not match is an IntegrityError that names it.
In shared stores the object's key is the chunk's after the first bytes of the fingerprint, so
that the chunks of one model can be listed and cleared.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor

import msgspec
import xxhash

from kvist_connector.errors import IntegrityError, TierError
from kvist_connector.tiers.base import Buffer, ChunkStore, Item, Read, total_bytes

HEADER_BYTES = 4096
FORMAT = 1
_MAGIC = b"KVISTCNK"
_PREFIX = struct.Struct("<8sII8sI")
MAX_TAG_BYTES = 2048
_SCAN_BATCH = 64
_SCOPE_BYTES = 16


class ForeignChunk(IntegrityError):  # noqa: N818 - a state, not a fault
    """The chunk is whole, and of another model or layout."""


class Header(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a stored chunk says about itself."""

    fingerprint: bytes
    key: bytes
    parent: bytes
    index: int
    ranks: int
    raw_bytes: int
    stored_bytes: int  # of the body as stored; equals raw_bytes without a codec
    checksum: bytes  # xxh3-64 of the stored body
    codec: str = ""
    key_id: str = ""  # of the encryption key
    tags: tuple[str, ...] = ()
    retire_epoch: int = 0


def tag_bytes(tags: Sequence[str]) -> int:
    """What tags take of a header, at most."""
    return sum(len(tag.encode()) + 5 for tag in tags)


def pack_header(header: Header) -> bytes:
    """Exactly HEADER_BYTES; raises ValueError when the tags do not fit."""
    if tag_bytes(header.tags) > MAX_TAG_BYTES:
        raise ValueError(f"tags of a chunk are limited to {MAX_TAG_BYTES} bytes")
    body = msgspec.msgpack.encode(header)
    prefix = _PREFIX.pack(_MAGIC, FORMAT, HEADER_BYTES, xxhash.xxh3_64_digest(body), len(body))
    return (prefix + body).ljust(HEADER_BYTES, b"\0")


def unpack_header(data: Buffer) -> Header:
    """Raises IntegrityError naming what is wrong."""
    magic, fmt, length, checksum, body_length = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise IntegrityError("not a Kvist chunk")
    if fmt != FORMAT or length != HEADER_BYTES:
        raise IntegrityError(f"chunk format {fmt} is not the supported format {FORMAT}")
    if body_length > HEADER_BYTES - _PREFIX.size:
        raise IntegrityError("the chunk's header is longer than its space")
    body = bytes(data[_PREFIX.size : _PREFIX.size + body_length])
    if xxhash.xxh3_64_digest(body) != checksum:
        raise IntegrityError("the chunk's header does not match its checksum")
    if bytes(data[_PREFIX.size + body_length : HEADER_BYTES]).strip(b"\0"):
        raise IntegrityError("the padding of the chunk's header is not empty")
    try:
        return msgspec.msgpack.decode(body, type=Header)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"the chunk's header cannot be read: {error}") from error


def checksum(parts: Sequence[Buffer]) -> bytes:
    """xxh3-64 over the concatenated parts; releases the GIL for large ones."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.digest()


class EnvelopeStore:
    """A store of chunks, as the agent uses it, over any `ChunkStore`."""

    def __init__(self, inner: ChunkStore, threads: Executor) -> None:
        self.inner = inner
        self._threads = threads
        self._scoped = inner.capabilities.shared

    @property
    def largest(self) -> int | None:
        """Most bytes of a chunk; None: no limit."""
        limit = self.inner.capabilities.largest
        return None if limit is None else limit - HEADER_BYTES

    async def get(self, fingerprint: bytes, key: bytes, into: Sequence[memoryview]) -> Header | None:
        """Fill the buffers with the chunk's bytes, verified; None when it is not stored."""
        head = bytearray(HEADER_BYTES)
        length = await self.inner.get(Read(self._name(fingerprint, key), [memoryview(head), *into]))
        if length is None:
            return None
        header = _expect(head, length, key)
        if header.fingerprint != fingerprint:
            raise ForeignChunk(f"chunk {key.hex()} has another fingerprint")
        if header.codec or header.key_id:
            raise IntegrityError(f"chunk {key.hex()} has codec {header.codec!r}, which is not supported")
        if header.raw_bytes != total_bytes(into):
            raise ForeignChunk(
                f"chunk {key.hex()} has {header.raw_bytes} bytes, expected {total_bytes(into)}"
            )
        found = await asyncio.get_running_loop().run_in_executor(self._threads, checksum, into)
        if found != header.checksum:
            raise IntegrityError(f"chunk {key.hex()} does not match its checksum")
        return header

    async def put_if_absent(
        self,
        parts: Sequence[Buffer],
        *,
        fingerprint: bytes,
        key: bytes,
        parent: bytes,
        index: int,
        tags: tuple[str, ...] = (),
    ) -> bool:
        """Store a chunk; false when it was stored before."""
        size = total_bytes(parts)
        header = Header(
            fingerprint=fingerprint,
            key=key,
            parent=parent,
            index=index,
            ranks=len(parts),
            raw_bytes=size,
            stored_bytes=size,
            checksum=await asyncio.get_running_loop().run_in_executor(self._threads, checksum, parts),
            tags=tags,
        )
        return await self.inner.put_if_absent(self._name(fingerprint, key), [pack_header(header), *parts])

    async def sizes(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """Stored length of each chunk, None for a miss; failures are returned, not raised."""
        return await self.inner.sizes([self._name(fingerprint, key) for key in keys])

    async def delete(self, fingerprint: bytes, key: bytes) -> bool:
        """Remove the chunk; false when there was none."""
        return await self.inner.delete(self._name(fingerprint, key))

    def objects(self, fingerprint: bytes) -> AsyncIterator[Item]:
        """What a shared store holds of this fingerprint, under the store's own keys."""
        return self.inner.items(fingerprint[:_SCOPE_BYTES])

    async def scan(self) -> AsyncIterator[tuple[bytes, int, Header | IntegrityError]]:
        """Key, stored size and header of every object, or what is wrong with it."""
        batch: list[bytes] = []
        async for item in self.inner.items():
            batch.append(item.key)
            if len(batch) == _SCAN_BATCH:
                for found in await self._heads(batch):
                    yield found
                batch.clear()
        for found in await self._heads(batch):
            yield found

    def _name(self, fingerprint: bytes, key: bytes) -> bytes:
        return fingerprint[:_SCOPE_BYTES] + key if self._scoped else key

    async def _heads(self, keys: Sequence[bytes]) -> list[tuple[bytes, int, Header | IntegrityError]]:
        """Headers of a batch; objects that vanished or cannot be read now are left out."""
        heads = [bytearray(HEADER_BYTES) for _ in keys]
        lengths = await self.inner.get_many(
            [Read(key, [memoryview(head)]) for key, head in zip(keys, heads, strict=True)]
        )
        found: list[tuple[bytes, int, Header | IntegrityError]] = []
        for key, head, length in zip(keys, heads, lengths, strict=True):
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
