"""`kvist`: least predicted TTFT; equal ones by outstanding prefill tokens, then at random."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvist_router.mind.choice import Candidate, Choice, least_outstanding, tie_band


class KvistPolicy:
    """Stateless."""

    def choose(self, candidates: Sequence[Candidate], random: Random) -> Choice:
        """Pick inside the tie band."""
        band = tie_band(candidates)
        chosen = least_outstanding(band, random)
        if len(band) == 1:
            return Choice(chosen.name, "least predicted TTFT")
        return Choice(chosen.name, f"fewest outstanding tokens of {len(band)} with equal predicted TTFT")
