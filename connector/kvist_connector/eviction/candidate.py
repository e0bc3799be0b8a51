"""One chunk of a tier as eviction sees it, and what a rule has to answer."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from kvist_connector.eviction.factors import Learned
from kvist_connector.eviction.visit import Visit

NEVER: Final = 2**62  # ticks


class Candidate(msgspec.Struct, eq=False, gc=False):
    """Books of one chunk. The index writes all of it but `hits` at entry, `visit` and `continued`.

    It refers to nothing that could refer to it, so the garbage collector need not look at a million.
    """

    key: bytes
    parent: bytes
    size: int  # bytes
    weight: float  # seconds a hit saves: recompute, or recompute less reload where it is stored below too
    used: float  # time of the last use, any monotonic unit
    tick: int = 0  # number of uses and entries in the tier until its last one
    depth: int = 0  # chunks before it, as far as they were in the tier when it came
    hits: int = 1
    visit: Visit | None = None  # of the request that used it last, where the policy keeps any
    continued: bool = False  # a chunk came after it while both were in the tier
    blocked: int = 0
    queue: int = 0
    serial: int = -1  # of its valid entry in a queue; -1: none


class Policy(Protocol):
    """The queue of the least number is emptied first, each from its least recently used. A policy belongs to
    one index, which calls all of it. It has few queues.
    """

    def enter(self, candidate: Candidate, parent: Candidate | None) -> None:
        """The chunk comes in; `parent` is the chunk before it if the tier has it."""

    def use(self, candidate: Candidate, parent: Candidate | None, tick: int) -> None:
        """It is used again at `tick`; its books still say how it was before."""

    def answer(self, candidate: Candidate, tokens: int | None) -> None:
        """A prompt ends with it, what enters after it is of the answer; or so many tokens were decoded."""

    def leave(self, candidate: Candidate, tick: int, evicted: bool) -> None:
        """It was evicted, or left for another reason."""

    def queue(self, candidate: Candidate, tick: int) -> int:
        """Its queue at `tick`; asked again after each change, and once `moves` says so."""

    def moves(self, candidate: Candidate, tick: int) -> int:
        """No later than the next tick at which it changes its queue by itself; `NEVER` if it does not."""

    def learned(self) -> Learned | None:
        """For one that comes after; None: it does not learn."""

    def worth(self, candidate: Candidate, queue: int) -> float:
        """Of keeping it, for comparisons outside; `queue` is its queue now."""
