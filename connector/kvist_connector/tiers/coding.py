"""What becomes of a chunk's bytes between memory and a tier: compressed, encrypted, checked.

Called by `envelope`, in its threads. Whatever was written is read by what its header says:
compressed chunks by every agent, encrypted ones by those that have the key, who take no others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from kvist_connector.errors import IntegrityError
from kvist_connector.tiers.base import Buffer, total_bytes
from kvist_connector.tiers.gain import Gain
from kvist_connector.tiers.header import SEAL_BYTES, ForeignChunk, Header, LockedChunk, checksum
from kvist_connector.tiers.pieces import Filler

if TYPE_CHECKING:
    from kvist_connector.tiers.encryption import Keyring

Compression = Literal["none", "auto", "zstd"]
CODEC: Final = "blosc-zstd"


class Coding:
    """Of one tier. `compression`: zstd always, auto where it was measured to be faster, none never.

    `keys` is asked for each chunk: they may change meanwhile.
    """

    def __init__(
        self,
        compression: Compression = "none",
        keys: Callable[[], Keyring] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._compression = compression
        self._keys = keys
        self.clock = clock  # seconds
        self.gain = Gain()

    @property
    def extra_bytes(self) -> int:
        """How much longer than its raw bytes a body may be."""
        return SEAL_BYTES if self._keys is not None else 0

    @property
    def largest(self) -> int | None:
        """Most raw bytes of a chunk: those of one message of the cipher; None: no limit."""
        return 2**31 - 1 - SEAL_BYTES if self._keys is not None else None

    def was_written(self, size: int, seconds: float) -> None:
        """The tier took `size` bytes."""
        self.gain = self.gain.wrote(size, seconds)

    def was_read(self, header: Header, seconds: float) -> None:
        """A chunk was read and decoded."""
        self.gain = self.gain.read(header.raw_bytes, seconds, packed=bool(header.codec))

    def encode(
        self, plain: Header, parts: Sequence[Buffer], compression: Compression | None = None
    ) -> tuple[Header, Sequence[Buffer]]:
        """Header and body as stored, from a header without codec, key and checksum.

        `compression`: of this chunk; None: as is the tier's rule.
        """
        packed = self._packed(parts, compression or self._compression)
        body = parts if packed is None else [packed]
        size = total_bytes(body) + self.extra_bytes
        header = msgspec.structs.replace(plain, codec="" if packed is None else CODEC, stored_bytes=size)
        if self._keys is not None:
            keys = self._keys()
            header = msgspec.structs.replace(header, key_id=keys.writing)
            body = keys.encrypt(body, _authenticated(header))
        return msgspec.structs.replace(header, checksum=checksum(body)), body

    def decode(self, header: Header, stored: Sequence[memoryview], into: Sequence[memoryview]) -> None:
        """Verify the body, which is the first bytes of `stored`, and leave its raw bytes in `into`.

        `stored` are the buffers of `into` and what follows them.
        """
        if header.codec not in ("", CODEC):
            raise IntegrityError(f"it has codec {header.codec!r}, which is not supported")
        body = _first(stored, header.stored_bytes)
        if checksum(body) != header.checksum:
            raise IntegrityError("it does not match its checksum")
        if not header.codec and not header.key_id:
            _expect_all(header, header.stored_bytes)
            return
        plain = self._opened(header, b"".join(body))
        if header.codec:
            self._unpacked(plain, into)
        else:
            _expect_all(header, len(plain))
            Filler(into).put(plain)

    def refuse(self, header: Header) -> None:
        """Before anything of a chunk is used: LockedChunk when it needs a key file and there is none,
        ForeignChunk when there is one and the chunk is plain, so that it may be anybody's."""
        if self._keys is not None and not header.key_id:
            raise ForeignChunk("not encrypted, and encryption.keys_file is given")
        if header.key_id and self._keys is None:
            raise LockedChunk(f"encrypted by key {header.key_id!r}: give encryption.keys_file with that key")

    def _opened(self, header: Header, body: bytes) -> bytes:
        if not header.key_id:
            return body
        self.refuse(header)
        assert self._keys is not None
        return self._keys().decrypt(header.key_id, body, _authenticated(header))

    def _packed(self, parts: Sequence[Buffer], compression: Compression) -> bytes | None:
        auto = compression == "auto"
        if compression == "none" or (auto and not self.gain.compress_next):
            return None
        # Whoever does not compress need not import the library.
        from kvist_connector.tiers.compression import compress

        packed = compress(parts)
        if auto:
            self._learn(packed, total_bytes(parts))
        return packed

    def _learn(self, packed: bytes | None, size: int) -> None:
        if packed is None:
            self.gain = self.gain.incompressible()
            return
        if not self.gain.unpacking:
            self._unpacked(packed, [memoryview(bytearray(size))])
        self.gain = self.gain.packed(size, len(packed))

    def _unpacked(self, packed: bytes, into: Sequence[memoryview]) -> None:
        from kvist_connector.tiers.compression import decompress

        start = self.clock()
        decompress(packed, into)
        self.gain = self.gain.unpacked(total_bytes(into), self.clock() - start)


def _authenticated(header: Header) -> bytes:
    """All of the header but the checksum, which is of the ciphertext."""
    return msgspec.msgpack.encode(msgspec.structs.replace(header, checksum=b""))


def _expect_all(header: Header, size: int) -> None:
    if size != header.raw_bytes:
        raise IntegrityError(f"it has {size} bytes, its header says {header.raw_bytes}")


def _first(views: Sequence[memoryview], size: int) -> list[memoryview]:
    found = []
    for view in views:
        part = view.cast("B")[:size]
        size -= part.nbytes
        found.append(part)
    if size:
        raise IntegrityError(f"it is stored in {size} bytes more than expected")
    return found
