"""One request on its way through a tier: what the chunks it used have in common.

A request uses leading chunks that are there and adds those after them, and then those of its answer.
The policy opens a visit with the first of them and extends it as the others come. Every chunk belongs to
the last visit that used it; what is known of the visit says which kind of chunk it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

MOST_USES: Final = 7  # of more nothing further is learned
PLACES: Final = 2 * (MOST_USES + 1)
_SHARES: Final = 5  # none, and quarters
_LENGTHS: Final = 12  # octaves of chunks
_FRESH: Final = 10  # none, and octaves of chunks
_ANSWERS: Final = 12  # unknown, none, and octaves of tokens
_CHUNK_OCTAVE: Final = 8  # an answer of so many chunks has about 2**8 times as many tokens


class Kind(NamedTuple):
    """What chunks are told apart by."""

    continued: int  # a chunk came after it while both were in the tier
    uses: int  # before the last one, ghosts' included
    answer: int  # length of the request's answer
    length: int  # of the prompt
    fresh: int  # chunks of the prompt that no request had used before
    share: int  # of the prompt that was found


@dataclass(slots=True, eq=False)
class Visit:
    """Chunks in order from the chain's first; `lives` counts those that no later request has used."""

    began: int  # tick
    depth: int = 0  # chunks so far, those before the ones in the tier not counted
    prompt: int = 0  # of them, without the answer's
    found: int = 0
    decoded: int = 0  # chunks of the answer
    tokens: int = -1  # of the answer; -1: not known yet
    over: bool = False  # the prompt: what comes now is decoded
    closed: bool = False  # a chunk was taken out of it
    code: int = 0
    lives: dict[int, int] = field(default_factory=dict)  # by place
    worth: dict[int, float] = field(default_factory=dict)  # found for its kind, by age and place

    def extend(self, uses: int) -> None:
        """By a chunk that had been used so often before."""
        self.depth += 1
        if self.over:
            self.decoded += 1
            return
        if uses and self.found == self.depth - 1:
            self.found = self.depth
        self.prompt = self.depth

    def encode(self) -> int:
        """The common part of its chunks' kind, as a number."""
        share = 0 if not self.found else min(_SHARES - 1, 1 + 4 * self.found // max(1, self.prompt))
        length = min(_LENGTHS - 1, max(1, self.prompt).bit_length() - 1)
        fresh = min(_FRESH - 1, (self.prompt - self.found).bit_length())
        return ((share * _LENGTHS + length) * _FRESH + fresh) * _ANSWERS + self._answer()

    def _answer(self) -> int:
        if self.tokens >= 0:
            return min(_ANSWERS - 1, 1 + self.tokens.bit_length())
        return min(_ANSWERS - 1, 1 + _CHUNK_OCTAVE + self.decoded.bit_length()) if self.decoded else 0


def place(uses: int, continued: bool) -> int:
    """The own part of a chunk's kind."""
    return 2 * (uses if uses < MOST_USES else MOST_USES) + continued


def cell(code: int, own: int) -> int:
    """Both parts."""
    return code * PLACES + own


def kind(number: int) -> Kind:
    """Back from the number of a cell."""
    code, own = divmod(number, PLACES)
    code, answer = divmod(code, _ANSWERS)
    code, fresh = divmod(code, _FRESH)
    share, length = divmod(code, _LENGTHS)
    return Kind(own % 2, own // 2, answer, length, fresh, share)
