"""One request on its way through a tier: what the chunks it used have in common.

A request uses leading chunks that are there and adds those after them, and then those of its answer.
The policy opens a visit with the first of them and extends it as the others come. Every chunk belongs to
the last visit that used it; what is known of the visit says which kind of chunk it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

MOST_USES: Final = 3  # of more nothing further is learned
_TURNS: Final = MOST_USES + 1
_SHARES: Final = 5  # none, and quarters
_LENGTHS: Final = 12  # octaves of chunks
_ANSWERS: Final = 3  # chunks of decoded tokens: none, one, more
_PLACES: Final = 2 * (MOST_USES + 1)


class Kind(NamedTuple):
    """What chunks are told apart by, in the order of the fit: what says more of reuse comes first."""

    continued: int  # a chunk came after it while both were in the tier
    uses: int  # before the last one, ghosts' included
    turn: int  # uses of the last chunk that its request found
    answer: int
    share: int  # of the prompt that was found
    length: int  # of the prompt


@dataclass(slots=True, eq=False)
class Visit:
    """Chunks in order from the chain's first; `lives` counts those that no later request has used."""

    began: int  # tick
    depth: int = 0  # chunks so far, those before the ones in the tier not counted
    prompt: int = 0  # of them, without the answer's
    found: int = 0
    turn: int = 0
    answer: int = 0
    over: bool = False  # the prompt: what comes now is decoded
    closed: bool = False  # a chunk was taken out of it
    code: int = 0
    lives: dict[int, int] = field(default_factory=dict)  # by place

    def extend(self, uses: int) -> None:
        """By a chunk that had been used so often before."""
        self.depth += 1
        if self.over:
            self.answer += 1
            return
        if uses and self.found == self.depth - 1:
            self.found, self.turn = self.depth, min(uses, MOST_USES)
        self.prompt = self.depth

    def encode(self) -> int:
        """The common part of its chunks' kind, as a number."""
        share = 0 if not self.found else min(_SHARES - 1, 1 + 4 * self.found // max(1, self.prompt))
        length = min(_LENGTHS - 1, max(1, self.prompt).bit_length() - 1)
        answer = min(self.answer, _ANSWERS - 1)
        return ((self.turn * _SHARES + share) * _LENGTHS + length) * _ANSWERS + answer


def place(uses: int, continued: bool) -> int:
    """The own part of a chunk's kind."""
    return 2 * (uses if uses < MOST_USES else MOST_USES) + continued


def cell(code: int, own: int) -> int:
    """Both parts."""
    return code * _PLACES + own


def kind(number: int) -> Kind:
    """Back from the number of a cell."""
    code, own = divmod(number, _PLACES)
    code, answer = divmod(code, _ANSWERS)
    code, length = divmod(code, _LENGTHS)
    turn, share = divmod(code, _SHARES)
    return Kind(own % 2, own // 2, turn, answer, share, length)
