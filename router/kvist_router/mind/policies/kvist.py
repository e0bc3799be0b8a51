"""`kvist`: the least cost to all; equal ones by outstanding prefill tokens, then reuse, then at random.

Cost = predicted TTFT (mind/cost.py) + delays of others (`choice.delays`) + work (`choice.work`).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvist_router.mind.choice import Candidate, Choice, Weights, least_outstanding, tie_band


class KvistPolicy:
    """Stateless. Without `feeds` it is `approximate`."""

    def __init__(self, feeds: bool = True, weights: Weights | None = None) -> None:
        self.feeds = feeds
        self._weights = weights

    def choose(
        self, candidates: Sequence[Candidate], random: Random, prefix: bytes = b"", unheard: int = 0
    ) -> Choice:
        """Pick inside the tie band."""
        band = tie_band(candidates, self._weights, unheard)
        chosen = least_outstanding(band, random)
        if len(band) == 1:
            return Choice(chosen.name, "least cost to all: its own TTFT, delays of others, work")
        return Choice(chosen.name, f"fewest outstanding tokens of {len(band)} with equal cost")
