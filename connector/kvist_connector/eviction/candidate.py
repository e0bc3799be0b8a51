"""One chunk of a tier as eviction sees it, and what a rule has to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class Candidate:
    """Books of one chunk. The index writes all of it but `hits` at entry, `turn` and `continued`."""

    key: bytes
    parent: bytes
    size: int  # bytes
    weight: float  # seconds a hit saves: recompute, or recompute less reload where it is stored below too
    used: float  # time of the last use, any monotonic unit
    tick: int = 0  # number of uses and entries in the tier until its last one
    hits: int = 1
    turn: int = 0  # how often its chain had been used again before it was continued by this chunk
    continued: bool = False  # a chunk came after it while both were in the tier
    blocked: int = 0
    queue: int = 0
    serial: int = -1  # of its valid entry in a queue; -1: none


class Policy(Protocol):
    """Smallest worth leaves first. A policy belongs to one index, which calls all of it.

    Candidates of one queue must rank by last use alone, so that the index compares only the least
    recently used one of each queue: a policy has few queues, and `worth` may change with time.
    """

    def enter(self, candidate: Candidate, parent: Candidate | None) -> None:
        """The chunk comes in; `parent` is the chunk before it if the tier has it."""

    def use(self, candidate: Candidate, tick: int) -> None:
        """It is used again at `tick`; its books still say how it was before."""

    def leave(self, candidate: Candidate, tick: int, evicted: bool) -> None:
        """It was evicted, or left for another reason."""

    def queue(self, candidate: Candidate, tick: int) -> int:
        """Its queue at `tick`; asked again after each change, and when it has come up in its queue."""

    def worth(self, candidate: Candidate, queue: int) -> float:
        """Of keeping it; `queue` is its queue now, and candidates of one queue differ by last use at most."""
