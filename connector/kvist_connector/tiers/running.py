"""A body's checksum, taken while the body is read: each piece is still in the processor's cache then."""

from __future__ import annotations

import xxhash

from kvist_connector.tiers.header import HEADER_BYTES


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
