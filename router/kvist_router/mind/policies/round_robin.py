"""`round-robin`: each replica in turn, by name; a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvist_router.mind.choice import Candidate, Choice


class RoundRobinPolicy:
    """Remembers the last name, so that replicas coming and going do not reset the turn."""

    feeds = False

    def __init__(self) -> None:
        self._last = ""

    def choose(
        self, candidates: Sequence[Candidate], random: Random, prefix: bytes = b"", unheard: int = 0
    ) -> Choice:
        """The next name after the last one, in order."""
        names = sorted(candidate.name for candidate in candidates)
        self._last = next((name for name in names if name > self._last), names[0])
        return Choice(self._last, "next in turn")
