"""Lossless compression of KV: the bytes of 16-bit values split in planes, each compressed with zstd.

The plane of signs and exponents repeats itself and shrinks, the plane of mantissas hardly does.
Called by `coding` in its threads; numcodecs releases the GIL. Fewer bytes help only a tier
slower than unpacking them: see `gain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from numcodecs import blosc

from kvist_connector.errors import IntegrityError
from kvist_connector.tiers.base import Buffer, total_bytes
from kvist_connector.tiers.pieces import Filler

# bench/compression.py on KV of SmolLM2: level 1 leaves 78 % of the bytes, 3 leaves 74 % and unpacks
# faster, 5 leaves 70 % at a third of the speed of packing.
_LEVEL: Final = 3


def compress(parts: Sequence[Buffer], value_bytes: int = 2) -> bytes | None:
    """The concatenated parts in one frame; None when that would not be smaller.

    `value_bytes`: the planes are of the first, second, ... bytes of so many.
    """
    size = total_bytes(parts)
    if not 0 < size <= blosc.MAX_BUFFERSIZE:
        return None
    packed: bytes = blosc.compress(
        b"".join(parts), b"zstd", _LEVEL, shuffle=blosc.SHUFFLE, typesize=value_bytes
    )
    return packed if len(packed) < size else None


def decompress(packed: bytes, into: Sequence[memoryview]) -> None:
    """Fill the buffers; IntegrityError when the frame does not hold exactly their bytes."""
    try:
        size = blosc._cbuffer_sizes(packed)[0] if len(packed) >= blosc.MAX_OVERHEAD else -1
        if size != total_bytes(into):
            raise IntegrityError(f"the compressed bytes hold {size}, expected {total_bytes(into)}")
        raw: bytes = blosc.decompress(packed)
    except (RuntimeError, ValueError) as error:
        raise IntegrityError(f"the compressed bytes cannot be unpacked: {error}") from error
    Filler(into).put(raw)
