"""Least recently used: one queue."""

from __future__ import annotations

from kvist_connector.eviction.candidate import NEVER, Candidate


class Lru:
    """Learns nothing; worth is the time of last use."""

    def enter(self, candidate: Candidate, parent: Candidate | None) -> None:
        """Nothing to learn."""

    def use(self, candidate: Candidate, parent: Candidate | None, tick: int) -> None:
        """Nothing to learn."""

    def answer(self, candidate: Candidate, tokens: int | None) -> None:
        """Nothing to learn."""

    def leave(self, candidate: Candidate, tick: int, evicted: bool) -> None:
        """Nothing to learn."""

    def learned(self) -> None:
        """Nothing."""

    def queue(self, candidate: Candidate, tick: int) -> int:
        """All in one."""
        return 0

    def moves(self, candidate: Candidate, tick: int) -> int:
        """There is no other."""
        return NEVER

    def worth(self, candidate: Candidate, queue: int) -> float:
        """Later is better."""
        return float(candidate.tick)
