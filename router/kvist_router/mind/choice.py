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

TIE_RATIO = 0.05  # costs within 5 % of the least's TTFT ...
TIE_SECONDS = 0.005  # ... or 5 ms of it are equal
WORK = 0.5  # a second of computing, in seconds of waiting for a first token
TURNOVER = 0.25  # the same for as much more as is computed there than elsewhere
CONVERSATION = 0.25  # of a prompt that is reused: a conversation goes on
STANDSTILL = 0.5  # a second that an answer stands still, in seconds of waiting for its first token


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A replica that could take the request."""

    name: str
    cost: Cost
    outstanding_tokens: int  # prefill tokens sent there by this router and not computed yet
    outstanding_requests: int
    waiting: int = 0  # requests there that wait for their first token, whoever sent them
    decoding: int = 0  # requests there that are being answered
    occupied: float = 0.0  # expected seconds that another one waits longer for KV space, if it takes this one
    lately: float = 0.0  # tokens computed there lately, whoever sent them
    prompt: int = 0  # tokens


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The replica taken, and why, in words for the record."""

    name: str
    reason: str


class Weights(Protocol):
    """What of policies/weights.py the cost to all takes."""

    @property
    def standstill(self) -> float:
        """In place of STANDSTILL."""

    @property
    def tie_ratio(self) -> float:
        """In place of TIE_RATIO."""

    @property
    def tie_seconds(self) -> float:
        """In place of TIE_SECONDS."""


class Policy(Protocol):
    """One way to choose. State, if any, is the policy's own."""

    @property
    def feeds(self) -> bool:
        """Whether costs come from the replicas' feeds; otherwise from this router's own dispatches."""

    def choose(
        self, candidates: Sequence[Candidate], random: Random, prefix: bytes = b"", unheard: int = 0
    ) -> Choice:
        """Pick one of the candidates, never none. `prefix`: a key equal for prompts that begin alike.

        `unheard`: other routers whose dispatches are not known here.
        """


def delays(candidate: Candidate, standstill: float = STANDSTILL) -> float:
    """Seconds that all others lose together when this replica takes the request.

        (waiting + standstill * decoding) * recompute + (waiting + decoding) * occupied

    Those who wait are counted for those who will come behind: in a steady state they are as many (Little's
    law). They wait for our prefill. Answers stand still while we prefill. And while we are there as many come
    as are there now: each waits longer for the KV space that we keep, if there is no other by then.
    """
    recompute, waiting, decoding = candidate.cost.recompute, candidate.waiting, candidate.decoding
    return (waiting + standstill * decoding) * recompute + (waiting + decoding) * candidate.occupied


def work(candidate: Candidate, mean: float) -> float:
    """What the computing itself costs, whoever is there.

        recompute * (WORK + TURNOVER * (lately - mean) / (mean + prompt))

    It is taken from who comes next, and evicts as much as is computed, which is computed again if it is
    wanted again. Where twice as much as the `mean` is computed chunks live half as long, and more of them are
    wanted again; while it is a few prompts that says nothing. So a prefix that another request computes is
    waited for, within a bound.
    """
    turnover = candidate.lately - mean
    if turnover:
        turnover /= mean + candidate.prompt
    return candidate.cost.recompute * (WORK + TURNOVER * turnover)


def tie_band(
    candidates: Sequence[Candidate], weights: Weights | None = None, unheard: int = 0
) -> list[Candidate]:
    """The candidates whose cost to all, predicted TTFT, delays and work, counts as equal to the least.

    Each router whose dispatches are not known makes costs as much less certain as the band is wide.
    """
    standstill, ratio, seconds = STANDSTILL, TIE_RATIO, TIE_SECONDS
    if weights is not None:
        standstill, ratio, seconds = weights.standstill, weights.tie_ratio, weights.tie_seconds
    mean = sum([candidate.lately for candidate in candidates]) / len(candidates)
    totals = [
        item.cost.total
        + (delays(item, standstill) if item.waiting or item.decoding else 0.0)
        + work(item, mean)
        for item in candidates
    ]
    least = min(totals)
    ttft = candidates[totals.index(least)].cost.total
    limit = least + max(ratio * ttft, seconds) * (1 + unheard)
    return [candidate for candidate, total in zip(candidates, totals, strict=True) if total <= limit]


def least_outstanding(candidates: Sequence[Candidate], random: Random) -> Candidate:
    """Fewest outstanding prefill tokens, most reused, least computed lately, then random: never by order.

    The second keeps a conversation where its longer prefix is, when computing the difference is a matter of
    milliseconds: it would otherwise be computed and kept in two places. A beginning that many prompts share
    is no conversation: it must be a quarter of the prompt.
    """
    ranks = [
        (item.outstanding_tokens, -reused if reused >= CONVERSATION * item.prompt else 0, item.lately)
        for item in candidates
        for reused in [item.cost.reused]
    ]
    least = min(ranks)
    return random.choice([item for item, rank in zip(candidates, ranks, strict=True) if rank == least])
