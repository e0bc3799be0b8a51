"""How often chunks are used again at each age, and what it is worth to keep them until then. Pure functions.

Age is cut into buckets that widen with it. A rate is uses per unit of age of a chunk that has got
that old. The value of an age is the most expected uses per expected time over all further ages up to
which the chunk could be kept: its Gittins index.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

PER_OCTAVE: Final = 2
BUCKETS: Final = 48
_BELOW: Final = 8  # what would be the first so many buckets is one: nothing is decided at such ages
EDGES: Final = (0.0, *(2 ** ((_BELOW + bucket) / PER_OCTAVE) for bucket in range(1, BUCKETS + 1)))
LEAVES: Final = tuple(math.ceil(edge) for edge in EDGES[1:])  # first age beyond each
FIRST_AGE: Final = 2 ** (_BELOW // PER_OCTAVE)
WIDTHS: Final = tuple(high - low for low, high in itertools.pairwise(EDGES))
SHAPE: Final = 0.3  # rate x age while nothing is known: falling with age is the order of LRU
_MIDDLES: Final = tuple((low + high) / 2 for low, high in itertools.pairwise(EDGES))
_KNOWN: Final = 5.0  # uses taken to have been seen in each bucket before any was, at the rate of SHAPE

_Piece = tuple[float, float, float]  # expected uses, expected time, chance that neither ended the wait


def bucket(age: int) -> int:
    """Of an age."""
    return max(0, min(int(PER_OCTAVE * math.log2(age)) - _BELOW, BUCKETS - 1)) if age > 1 else 0


def stage(age: int) -> int:
    """Of an age; half as wide as a bucket. Chunks are asked again for their worth as often."""
    return int(2 * PER_OCTAVE * math.log2(age)) if age > FIRST_AGE else 2 * _BELOW


def stage_ends(number: int) -> int:
    """The first age beyond the stage."""
    return math.ceil(2 ** ((number + 1) / (2 * PER_OCTAVE)))


def overall(uses: Sequence[float], spent: Sequence[float]) -> list[float]:
    """Rates of all chunks together, near SHAPE / age where little was seen."""
    return [
        (seen + _KNOWN) / (time + _KNOWN * middle / SHAPE)
        for seen, time, middle in zip(uses, spent, _MIDDLES, strict=True)
    ]


def best_rates(rates: Sequence[float]) -> list[float]:
    """Value of each bucket, from its middle on.

    Going back from the oldest age, whatever lies ahead is kept as pieces of falling rate: waiting
    through a piece is worth it as long as its rate is above that of all before it.
    """
    values = [0.0] * len(rates)
    ahead: list[_Piece] = []  # the nearest last
    for place in range(len(rates) - 1, -1, -1):
        half, whole = _piece(rates[place], WIDTHS[place] / 2), _piece(rates[place], WIDTHS[place])
        for piece in reversed(ahead):
            if piece[0] * half[1] <= half[0] * piece[1]:
                break
            half = _joined(half, piece)
        values[place] = half[0] / half[1]
        while ahead and ahead[-1][0] * whole[1] > whole[0] * ahead[-1][1]:
            whole = _joined(whole, ahead.pop())
        ahead.append(whole)
    return values


def _piece(rate: float, width: float) -> _Piece:
    used = -math.expm1(-rate * width)
    return used, used / rate, 1 - used


def _joined(first: _Piece, then: _Piece) -> _Piece:
    uses, time, waiting = first
    return uses + waiting * then[0], time + waiting * then[1], waiting * then[2]
