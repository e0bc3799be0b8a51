"""Whether compression pays for a tier, from what was measured of both. Pure.

A read of R raw bytes takes R/b as they are, and ratio R/b + R/u compressed: b is the rate of one
stream while others use the tier too, u that of unpacking in one thread beside them. Both are
measured as the agent meets them. Until chunks are read the rate of writing stands for b; servers
that write more slowly than they read make compression look better than it is, for that long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

_WEIGHT: Final = 0.3
# So many chunks go by the decision before one goes the other way.
_TRIAL: Final = 64


@dataclass(frozen=True)
class Gain:
    """What is known of one tier, in moving means; rates are bytes a second, 0 before a measurement."""

    writing: float = 0.0  # of the tier, per stream
    reading: float = 0.0
    unpacking: float = 0.0  # of raw bytes
    ratio: float = 1.0  # stored by raw
    chunks: int = 0

    @property
    def bandwidth(self) -> float:
        """Of a read."""
        return self.reading or self.writing

    @property
    def worth(self) -> bool:
        """Whether a read ends earlier with compression."""
        return (1 - self.ratio) * self.unpacking > self.bandwidth

    @property
    def compress_next(self) -> bool:
        """The decision, and now and then the other way, so that both sides stay measured."""
        if not self.bandwidth:
            return False
        return self.worth != (self.chunks % _TRIAL == 0) if self.unpacking else True

    def wrote(self, size: int, seconds: float) -> Gain:
        """`size` bytes went to the tier as they were stored."""
        return replace(self, writing=_mean(self.writing, _rate(size, seconds)), chunks=self.chunks + 1)

    def read(self, size: int, seconds: float) -> Gain:
        """`size` bytes came from the tier as they were stored."""
        return replace(self, reading=_mean(self.reading, _rate(size, seconds)))

    def packed(self, raw: int, stored: int) -> Gain:
        """A chunk became `stored` bytes."""
        return replace(self, ratio=_mean(self.ratio if self.ratio < 1 else 0.0, stored / raw))

    def incompressible(self) -> Gain:
        """A chunk did not shrink."""
        return replace(self, ratio=_mean(self.ratio, 1.0), unpacking=self.unpacking or 1.0)

    def unpacked(self, raw: int, seconds: float) -> Gain:
        """Unpacking a chunk to `raw` bytes took so long."""
        return replace(self, unpacking=_mean(self.unpacking, _rate(raw, seconds)))


def _rate(size: int, seconds: float) -> float:
    return size / max(seconds, 1e-6)


def _mean(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
