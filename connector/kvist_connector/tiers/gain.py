"""Whether compression pays for a tier, from what was measured of both. Pure.

What counts is when a read ends, unpacking included: the mean time a raw byte takes of chunks read
as they are, and of compressed ones, as the agent reads them (in parallel, beside an engine). Until
enough of both were read, a forecast stands for that: a read of R raw bytes takes R/b as they are,
ratio R/b + R/u compressed, b being the tier's rate at writing and u that of unpacking, and only a
clear advantage counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

_WEIGHT: Final = 0.3
_READ_WEIGHT: Final = 0.1
# So many reads of each kind, then they decide.
_READS: Final = 8
# So many chunks go by the decision before one goes the other way; more often while too few were read.
_TRIAL: Final = 64
_EARLY_TRIAL: Final = 8
# Compression takes processor time: it has to be better by more than chance.
_MARGIN: Final = 0.9
_FORECAST_MARGIN: Final = 0.5


@dataclass(frozen=True)
class Reads:
    """Moving mean of the seconds that a raw byte took."""

    seconds: float = 0.0
    count: int = 0

    @property
    def rate(self) -> float:
        """Raw bytes a second; 0 before a read."""
        return 1 / self.seconds if self.seconds else 0.0

    def add(self, raw: int, seconds: float) -> Reads:
        """One more read."""
        new = seconds / max(raw, 1)
        mean = self.seconds + _READ_WEIGHT * (new - self.seconds) if self.count else new
        return Reads(mean, self.count + 1)


@dataclass(frozen=True)
class Gain:
    """What is known of one tier, in moving means; rates are bytes a second, 0 before a measurement."""

    writing: float = 0.0  # of the tier, per stream
    unpacking: float = 0.0  # of raw bytes
    ratio: float = 1.0  # stored by raw
    chunks: int = 0
    plain: Reads = Reads()
    packed_reads: Reads = Reads()

    @property
    def worth(self) -> bool:
        """Whether a read ends earlier with compression."""
        if self.ratio >= 1:
            return False
        if self._read_enough:
            return self.packed_reads.seconds < _MARGIN * self.plain.seconds
        return _FORECAST_MARGIN * (1 - self.ratio) * self.unpacking > self.writing

    @property
    def compress_next(self) -> bool:
        """The decision, and now and then the other way, so that both sides stay measured."""
        if not self.writing:
            return False
        trial = _TRIAL if self._read_enough else _EARLY_TRIAL
        return self.worth != (self.chunks % trial == 0) if self.unpacking else True

    def wrote(self, size: int, seconds: float) -> Gain:
        """`size` bytes went to the tier as they were stored."""
        return replace(self, writing=_mean(self.writing, _rate(size, seconds)), chunks=self.chunks + 1)

    def read(self, raw: int, seconds: float, *, packed: bool) -> Gain:
        """A chunk of `raw` bytes was read and, when it was packed, unpacked."""
        if packed:
            return replace(self, packed_reads=self.packed_reads.add(raw, seconds))
        return replace(self, plain=self.plain.add(raw, seconds))

    def packed(self, raw: int, stored: int) -> Gain:
        """A chunk became `stored` bytes."""
        return replace(self, ratio=_mean(self.ratio if self.ratio < 1 else 0.0, stored / raw))

    def incompressible(self) -> Gain:
        """A chunk did not shrink."""
        return replace(self, ratio=_mean(self.ratio, 1.0), unpacking=self.unpacking or 1.0)

    def unpacked(self, raw: int, seconds: float) -> Gain:
        """Unpacking a chunk to `raw` bytes took so long."""
        return replace(self, unpacking=_mean(self.unpacking, _rate(raw, seconds)))

    @property
    def _read_enough(self) -> bool:
        return min(self.plain.count, self.packed_reads.count) >= _READS


def _rate(size: int, seconds: float) -> float:
    return size / max(seconds, 1e-6)


def _mean(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
