"""Pauses between attempts at what failed. Used by feeds, drains, discovery and the keeper."""

from __future__ import annotations

from random import Random


class Pauses:
    """Seconds: each twice the one before, from `first` to `longest`, and shorter by chance.

    Who failed together comes back one by one.
    """

    def __init__(self, first: float, longest: float, random: Random) -> None:
        self._first, self._longest = first, longest
        self._random = random
        self._next = first

    def anew(self) -> None:
        """What failed works: the next pause is the shortest again."""
        self._next = self._first

    def next(self) -> float:
        """How long to wait before the next attempt."""
        seconds = self._next * self._random.uniform(0.5, 1.0)
        self._next = min(self._longest, 2 * self._next)
        return seconds
