"""`least-load`: fewest requests in flight, blind to caches; a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvist_router.mind.choice import Candidate, Choice


class LeastLoadPolicy:
    """Stateless."""

    feeds = False

    def choose(
        self, candidates: Sequence[Candidate], random: Random, prefix: bytes = b"", unheard: int = 0
    ) -> Choice:
        """Fewest requests, then at random."""
        return fewest_requests(candidates, random)


def fewest_requests(candidates: Sequence[Candidate], random: Random) -> Choice:
    """The one with the fewest requests in flight, of equal ones a random one."""
    least = min(candidate.outstanding_requests for candidate in candidates)
    equal = [item for item in candidates if item.outstanding_requests == least]
    return Choice(random.choice(equal).name, f"{least} requests in flight, the fewest")
