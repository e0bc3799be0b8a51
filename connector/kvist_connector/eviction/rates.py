"""How often chunks are used again at each age, and what it is worth to keep them until then. Pure functions.

Age is cut into buckets that widen with it. A rate is uses per unit of age of a chunk that has got
that old. The value of an age is the most expected uses per expected time over all further ages up to
which the chunk could be kept: its Gittins index.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Final

PER_OCTAVE: Final = 2
BUCKETS: Final = 56
EDGES: Final = tuple(2 ** (bucket / PER_OCTAVE) for bucket in range(BUCKETS + 1))
LEAVES: Final = tuple(math.ceil(edge) for edge in EDGES[1:])  # first age beyond each
SHAPE: Final = 0.3  # rate x age while nothing is known: falling with age is the order of LRU
_WIDTHS: Final = tuple(high - low for low, high in itertools.pairwise(EDGES))
_MIDDLES: Final = tuple((low + high) / 2 for low, high in itertools.pairwise(EDGES))
_KNOWN: Final = 5.0  # uses taken to have been seen in each bucket before any was, at the rate of SHAPE

_Piece = tuple[float, float, float]  # expected uses, expected time, chance that neither ended the wait


def bucket(age: int) -> int:
    """Of an age."""
    return min(int(PER_OCTAVE * math.log2(age)), BUCKETS - 1) if age > 1 else 0


def unknown() -> list[float]:
    """Values before anything was learned."""
    return [SHAPE / edge for edge in EDGES[:-1]]


def exposure(
    uses: Sequence[float], ends: Sequence[float], ages: Iterable[tuple[int, int]] = ()
) -> list[float]:
    """Time spent in each bucket: by lives that ended there or later, used or not, and by those under way.

    `ages` says how many of these have got how old (Kaplan and Meier 1958: a life cut short counts for
    the ages that it has reached).
    """
    living, lived = [0.0] * BUCKETS, [0.0] * BUCKETS
    for age, lives in ages:
        place = bucket(age)
        living[place] += lives
        lived[place] += lives * (age - EDGES[place])
    spent, later = [0.0] * BUCKETS, 0.0
    for place in range(BUCKETS - 1, -1, -1):
        inside = uses[place] + ends[place]
        spent[place] = _WIDTHS[place] * (later + inside / 2) + lived[place]
        later += inside + living[place]
    return spent


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
        half, whole = _piece(rates[place], _WIDTHS[place] / 2), _piece(rates[place], _WIDTHS[place])
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
