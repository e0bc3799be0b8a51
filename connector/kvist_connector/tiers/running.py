"""A body's checksum, taken while the body is moved: each piece is in the processor's cache then."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from kvist_connector.tiers.base import Buffer, Sealed
from kvist_connector.tiers.header import HEADER_BYTES, Header, pack_header


class RunningChecksum:
    """A `Read.seen` for an object that begins with a header. The checksum is that of header.py."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()
        self._count = 0  # bytes of the object

    def __call__(self, piece: memoryview) -> None:
        """What comes next of the object."""
        head = max(0, HEADER_BYTES - self._count)
        self._digest.update(piece[head:])
        self._count += piece.nbytes

    def of(self, size: int) -> bytes | None:
        """The checksum of a body of so many bytes; None when it was not seen, or not as such."""
        return self._digest.digest() if self._count == HEADER_BYTES + size else None


def sealed(header: Header, body: Sequence[Buffer]) -> Sealed:
    """What is stored of a chunk whose header lacks the checksum."""
    digest = xxhash.xxh3_64()

    def seal() -> bytes:
        return pack_header(msgspec.structs.replace(header, checksum=digest.digest()))

    return Sealed(HEADER_BYTES, body, digest.update, seal)
