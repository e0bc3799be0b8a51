"""What becomes of a chunk's bytes between memory and a tier: rounded, compressed, encrypted, checked.

Called by `envelope`, in its threads. Whatever was written is read by what its header says:
compressed chunks by every agent, encrypted ones by those that have the key, who take no others,
rounded ones by agents that round themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from kvist_connector.errors import IntegrityError
from kvist_connector.protocol.engine import Values
from kvist_connector.tiers.base import Buffer, total_bytes
from kvist_connector.tiers.gain import Gain
from kvist_connector.tiers.header import (
    SEAL_BYTES,
    ForeignChunk,
    Header,
    LockedChunk,
    LossyChunk,
    checksum,
)
from kvist_connector.tiers.pieces import Filler

if TYPE_CHECKING:
    from kvist_connector.tiers.encryption import Keyring

Compression = Literal["none", "auto", "zstd", "fp8"]
CODEC: Final = "blosc-zstd"
FLOAT8: Final = "float8_e4m3"
_CODECS: Final = ("", CODEC, FLOAT8, f"{FLOAT8}+{CODEC}")


class CodingState(msgspec.Struct, frozen=True):
    """How chunks of a tier are stored now, for stats and metrics; rates are 0 before a measurement."""

    codec: Compression  # the tier's rule
    compresses: bool  # whether most chunks are compressed by it now
    ratio: float  # stored by raw bytes of those compressed lately
    write_bytes_per_second: float  # stored bytes, one chunk
    unpack_bytes_per_second: float  # raw bytes, one chunk
    plain_read_bytes_per_second: float  # raw bytes, of chunks stored as they are
    packed_read_bytes_per_second: float  # the same of compressed ones


class Coding:
    """Of one tier. `compression`: zstd always, auto where it was measured to be faster, none never;
    fp8: rounded to 8 bits by value, then zstd.

    `keys` is asked for each chunk: they may change meanwhile. `exact`: chunks that were rounded are
    refused. `values` says what fp8 rounds; without it, and where a value is not finite, fp8 is zstd.
    """

    def __init__(
        self,
        compression: Compression = "none",
        keys: Callable[[], Keyring] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        exact: bool = True,
    ) -> None:
        self.compression = compression
        self.values = Values()
        self._keys = keys
        self._exact = exact and compression != "fp8"
        self.clock = clock  # seconds
        self.gain = Gain()

    @property
    def state(self) -> CodingState:
        """What was decided, and what was measured."""
        gain = self.gain
        return CodingState(
            codec=self.compression,
            compresses=gain.worth if self.compression == "auto" else self.compression != "none",
            ratio=gain.ratio,
            write_bytes_per_second=gain.writing,
            unpack_bytes_per_second=gain.unpacking,
            plain_read_bytes_per_second=gain.plain.rate,
            packed_read_bytes_per_second=gain.packed_reads.rate,
        )

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
        header, body = self.shape(plain, parts, compression)
        return msgspec.structs.replace(header, checksum=checksum(body)), body

    @property
    def changes(self) -> bool:
        """Whether `shape` may do more than to copy a header."""
        return self.compression != "none" or self._keys is not None

    def shape(
        self, plain: Header, parts: Sequence[Buffer], compression: Compression | None = None
    ) -> tuple[Header, Sequence[Buffer]]:
        """As `encode`, but the header lacks the checksum."""
        rule = compression or self.compression
        rounded = self._rounded(parts) if rule == "fp8" else None
        if rounded is not None:
            parts = [rounded]
        packed = self._packed(parts, rule, 2 if rounded is None else 1)
        body = parts if packed is None else [packed]
        if rule in ("zstd", "fp8") and (packed or rounded):
            self.gain = self.gain.packed(plain.raw_bytes, total_bytes(body))
        header = msgspec.structs.replace(
            plain,
            codec="+".join([FLOAT8] * (rounded is not None) + [CODEC] * (packed is not None)),
            stored_bytes=total_bytes(body) + self.extra_bytes,
            lossy=plain.lossy or rounded is not None,
            values=self.values if rounded is not None else Values(),
        )
        if self._keys is not None:
            keys = self._keys()
            header = msgspec.structs.replace(header, key_id=keys.writing)
            body = keys.encrypt(body, _authenticated(header))
        return header, body

    def decode(
        self,
        header: Header,
        stored: Sequence[memoryview],
        into: Sequence[memoryview],
        digest: bytes | None = None,
    ) -> None:
        """Verify the body, which is the first bytes of `stored`, and leave its raw bytes in `into`.

        `stored` are the buffers of `into` and what follows them; `digest` is the body's checksum, if it has
        been taken.
        """
        if header.codec not in _CODECS:
            raise IntegrityError(f"it has codec {header.codec!r}, which is not supported")
        body = _first(stored, header.stored_bytes)
        if (digest or checksum(body)) != header.checksum:
            raise IntegrityError("it does not match its checksum")
        if not header.codec and not header.key_id:
            _expect_all(header, header.stored_bytes)
            return
        plain = self._opened(header, b"".join(body))
        if header.codec.startswith(FLOAT8):
            self._restored(header, plain, into)
        elif header.codec:
            self._unpacked(plain, into)
        else:
            _expect_all(header, len(plain))
            Filler(into).put(plain)

    def refuse(self, header: Header) -> None:
        """Before anything of a chunk is used: LockedChunk when it needs a key file and there is none,
        ForeignChunk when there is one and the chunk is plain, so that it may be anybody's, LossyChunk when
        it was rounded and only exact ones are wanted."""
        if header.lossy and self._exact:
            raise LossyChunk("its values were rounded by compression fp8, which no tier of this agent has")
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

    def _rounded(self, parts: Sequence[Buffer]) -> bytes | None:
        if not self.values.known:
            return None
        from kvist_connector.tiers.lossy import pack

        return pack(parts, self.values)

    def _restored(self, header: Header, plain: bytes, into: Sequence[memoryview]) -> None:
        from kvist_connector.tiers.lossy import packed_bytes, unpack

        if not header.values.known:
            raise IntegrityError(f"it is of float8 and does not say of what values: {header.values}")
        body: Buffer = plain
        if header.codec != FLOAT8:
            body = bytearray(packed_bytes(header.raw_bytes, header.values))
            self._unpacked(plain, [memoryview(body)])
        unpack(body, header.values, into)

    def _packed(self, parts: Sequence[Buffer], compression: Compression, value_bytes: int) -> bytes | None:
        auto = compression == "auto"
        if compression == "none" or (auto and not self.gain.compress_next):
            return None
        # Whoever does not compress need not import the library.
        from kvist_connector.tiers.compression import compress

        packed = compress(parts, value_bytes)
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
