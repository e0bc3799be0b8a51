"""The choice among replicas: a snapshot of candidates in, one of them and the reason out. Pure.

Called by mind/mind.py through the policies in mind/policies/. Filters run before: every
candidate is healthy, serves the model and is not draining.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

import msgspec

from kvist_router.mind.cost import Cost

TIE_RATIO = 0.05  # costs within 5 % ...
TIE_SECONDS = 0.005  # ... or 5 ms of the least are equal


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A replica that could take the request."""

    name: str
    cost: Cost
    outstanding_tokens: int  # prefill tokens sent there by this router and not computed yet
    outstanding_requests: int


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The replica taken, and why, in words for the record."""

    name: str
    reason: str


class Policy(Protocol):
    """One way to choose. `candidates` is never empty; state, if any, is the policy's own."""

    def choose(self, candidates: Sequence[Candidate], random: Random) -> Choice:
        """Pick one of the candidates."""


def tie_band(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates whose predicted TTFT counts as equal to the least."""
    totals = [candidate.cost.total for candidate in candidates]
    least = min(totals)
    limit = least + max(TIE_RATIO * least, TIE_SECONDS)
    return [candidate for candidate, total in zip(candidates, totals, strict=True) if total <= limit]


def least_outstanding(candidates: Sequence[Candidate], random: Random) -> Candidate:
    """Fewest outstanding prefill tokens, then most reused, then random: never the first by order.

    The second keeps a conversation where its longer prefix is, when computing the difference is a matter of
    milliseconds: it would otherwise be computed and kept in two places.
    """
    ranks = [(candidate.outstanding_tokens, -candidate.cost.reused) for candidate in candidates]
    least = min(ranks)
    return random.choice([item for item, rank in zip(candidates, ranks, strict=True) if rank == least])
