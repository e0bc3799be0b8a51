"""How much a replica has computed lately: that evicts as much, so where it is more, younger chunks go.

Called by mind/inflight.py and neighbours/known.py, which add, and pricing.py, which asks.
"""

from __future__ import annotations

import math

LATELY_SECONDS = 120.0


class Lately:
    """A sum of tokens in which those of `age` seconds ago count exp(-age / LATELY_SECONDS)."""

    def __init__(self) -> None:
        self._tokens, self._as_of = 0.0, 0.0

    def add(self, tokens: int, now: float) -> None:
        """So many are going to be computed."""
        self._tokens, self._as_of = self.tokens(now) + tokens, now

    def tokens(self, now: float) -> float:
        """As of now."""
        if not self._tokens:
            return 0.0
        return self._tokens * math.exp(-max(0.0, now - self._as_of) / LATELY_SECONDS)
