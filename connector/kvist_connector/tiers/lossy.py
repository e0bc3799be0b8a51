"""Lossy compression of KV: each 16 or 32-bit float becomes 8 bits, float8_e4m3, with shared scales.

The values of a run (the K or the V of one head at one token) share a scale, a power of two,
so that the greatest of them is just below the greatest float8: the element and scale formats of the
OCP Microscaling specification (E4M3 and E8M0) with a longer run. As scaling is exact, a chunk that went
through here once comes out of it the second time as it went in.

    body: a scale a run (exponent + 127) | a code a value, both in the order of the values

Called by `coding` in its threads, in slabs, so that numpy's passes stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvist_connector.errors import IntegrityError
from kvist_connector.protocol.engine import VALUE_BYTES, Values
from kvist_connector.tiers.base import Buffer, total_bytes
from kvist_connector.tiers.pieces import Filler

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_SLAB: Final = 65_536  # values
_LARGEST: Final = 448.0  # of float8_e4m3
_BIAS: Final = 127
_MAGNITUDE: Final = np.uint32(0x7FFF_FFFF)
_INFINITE: Final = np.uint32(0x7F80_0000)
_ABOVE_LARGEST: Final = np.uint32(0x0060_0000)  # mantissa of 1.75, as 448 is 1.75 * 2^8
_SMALLEST_NORMAL: Final = np.float32(2.0**-6)
# Adding it leaves a float32 whose last bit is 2^-9, the step of small float8: the processor rounds.
_ROUNDER: Final = np.float32(2.0**14)
_ROUNDER_BITS: Final = np.uint32(0x4680_0000)
_EXPONENTS_APART: Final = np.uint32((_BIAS - 7) << 3)
_MOST: Final = {
    "bfloat16": float(np.array([0x7F7F_0000], np.uint32).view(np.float32)[0]),
    "float16": 65504.0,
    "float32": float(np.finfo(np.float32).max),
}


def packed_bytes(raw: int, values: Values) -> int:
    """Bytes of the body that `raw` bytes become."""
    count = raw // VALUE_BYTES[values.dtype]
    return count + count // values.run


def pack(parts: Sequence[Buffer], values: Values) -> bytes | None:
    """The body of these parts; None when it would change a value by more than rounding (infinite, NaN)."""
    scales: list[bytes] = []
    codes: list[bytes] = []
    for part in parts:
        for slab in _slabs(part, values):
            found = _coded(slab.reshape(-1, values.run))
            if found is None:
                return None
            scales.append(found[0].tobytes())
            codes.append(found[1].tobytes())
    return b"".join((*scales, *codes))


def unpack(body: Buffer, values: Values, into: Sequence[memoryview]) -> None:
    """Fill the buffers; IntegrityError when the body does not hold exactly their values."""
    raw = total_bytes(into)
    if not values.known or raw % (VALUE_BYTES[values.dtype] * values.run):
        raise IntegrityError(f"{raw} bytes are no whole runs of {values}")
    view = memoryview(body)
    if view.nbytes != packed_bytes(raw, values):
        raise IntegrityError(f"it has {view.nbytes} bytes of float8, expected {packed_bytes(raw, values)}")
    runs = raw // (VALUE_BYTES[values.dtype] * values.run)
    scales = np.frombuffer(view[:runs], np.uint8)
    codes = np.frombuffer(view[runs:], np.uint8).reshape(runs, values.run)
    table, filler = _table(), Filler(into)
    step = max(1, _SLAB // values.run)
    for start in range(0, runs, step):
        floats = table.take(codes[start : start + step], mode="clip")
        with np.errstate(over="ignore", invalid="ignore"):  # the greatest values of all are cut below
            floats *= _powers(scales[start : start + step].astype(np.int32) - _BIAS)[:, None]
        filler.put(_as(floats, values.dtype).tobytes())


def _slabs(part: Buffer, values: Values) -> Iterator[Floats]:
    """The part's values as float32, whole runs at a time."""
    view = memoryview(part).cast("B")
    size = VALUE_BYTES[values.dtype] * values.run
    step = max(1, _SLAB // values.run) * size
    for start in range(0, view.nbytes, step):
        yield _floats(view[start : start + step], values.dtype)


def _floats(view: memoryview, dtype: str) -> Floats:
    if dtype == "bfloat16":
        wide = np.frombuffer(view, np.uint16).astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if dtype == "float16":
        return np.frombuffer(view, np.float16).astype(np.float32)
    return np.frombuffer(view, np.float32)


def _as(floats: Floats, dtype: str) -> NDArray[Any]:
    """Of the type as it is stored; what would round to infinity becomes the greatest finite value."""
    most = _MOST[dtype]
    np.clip(floats, -most, most, out=floats)
    if dtype == "bfloat16":
        # Exact: a float8 has fewer bits.
        return (floats.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return floats.astype(np.float16) if dtype == "float16" else floats


def _coded(runs: Floats) -> tuple[Bytes, Bytes] | None:
    """Scales and codes of runs (a row each); None when a value is not finite."""
    bits = runs.view(np.uint32)
    magnitude = bits & _MAGNITUDE
    greatest = magnitude.max(axis=1)
    if greatest.size and greatest.max() >= _INFINITE:
        return None
    above = (greatest & np.uint32(0x007F_FFFF)) > _ABOVE_LARGEST
    exponents = (greatest >> np.uint32(23)).astype(np.int32) - (_BIAS + 8) + above
    np.maximum(exponents, -_BIAS, out=exponents)
    scaled = magnitude.view(np.float32)
    scaled *= _powers(-exponents)[:, None]
    codes = _rounded(scaled)
    codes |= (bits >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
    return (exponents + _BIAS).astype(np.uint8), codes


def _rounded(scaled: Floats) -> Bytes:
    """Codes of values in 0..448, to the nearest, ties to even."""
    bits = scaled.view(np.uint32)
    normal = (bits >> np.uint32(20)) & np.uint32(1)
    normal += bits
    normal += np.uint32(0x7_FFFF)
    normal >>= np.uint32(20)
    normal -= _EXPONENTS_APART
    small = (scaled + _ROUNDER).view(np.uint32)
    small -= _ROUNDER_BITS
    return np.where(scaled < _SMALLEST_NORMAL, small, normal).astype(np.uint8)


def _powers(exponents: NDArray[np.int32]) -> Floats:
    """Two to these powers, exactly: a float32 has them from -149 to 127."""
    return np.ldexp(np.float32(1), exponents)


def _table() -> Floats:
    """The value of each code of float8_e4m3; the two that stand for NaN are never written."""
    codes = np.arange(256, dtype=np.int32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes & 0x80, -value, value).astype(np.float32)
