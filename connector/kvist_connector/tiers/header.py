"""The header of a stored chunk: 4 KiB that say what the bytes after them are.

    magic "KVISTCNK" | u32 format | u32 header bytes | xxh3 of the header's msgpack | length | msgpack

Complete from format 1: codec, key id, tags and retire epoch need no new format.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import xxhash

from kvist_connector.errors import IntegrityError
from kvist_connector.protocol.engine import NO_VALUES, Values
from kvist_connector.protocol.tags import MAX_TAG_BYTES, tag_bytes
from kvist_connector.tiers.base import Buffer

HEADER_BYTES = 4096
FORMAT = 1
_MAGIC = b"KVISTCNK"
_PREFIX = struct.Struct("<8sII8sI")
_NOTHING = bytes(HEADER_BYTES)
# Of an encrypted body: nonce, then ciphertext, then the cipher's tag.
NONCE_BYTES = 12
SEAL_BYTES = NONCE_BYTES + 16


class ForeignChunk(IntegrityError):  # noqa: N818 - a state, not a fault
    """The chunk is whole, and of another model or layout."""


class LockedChunk(IntegrityError):  # noqa: N818 - a state, not a fault
    """The chunk is encrypted, and not by a key that this agent has."""


class LossyChunk(IntegrityError):  # noqa: N818 - a state, not a fault
    """The chunk's values were rounded by fp8, and whoever reads it wants them as they were computed."""


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
    lossy: bool = False  # it went through fp8, here or before it was stored here
    values: Values = NO_VALUES  # of a body in float8


def pack_header(header: Header) -> bytes:
    """Exactly HEADER_BYTES; raises ValueError when the tags do not fit."""
    if tag_bytes(header.tags) > MAX_TAG_BYTES:
        raise ValueError(f"tags of a chunk are limited to {MAX_TAG_BYTES} bytes")
    body = msgspec.msgpack.encode(header)
    prefix = _PREFIX.pack(_MAGIC, FORMAT, HEADER_BYTES, xxhash.xxh3_64_digest(body), len(body))
    return (prefix + body).ljust(HEADER_BYTES, b"\0")


def mark_of(header: Header) -> bytes:
    """The first bytes of a header, which no other header has: a checksum of it is among them."""
    return pack_header(header)[: _PREFIX.size]


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
    used = _PREFIX.size + body_length
    if bytes(data[used:HEADER_BYTES]) != _NOTHING[used:]:
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
