"""What a request would cost on one replica, and others because of it. Called by mind/mind.py.

Reads the replica, changes nothing. `choice.delays` and the policies weigh what is gathered here.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist_router.mind.choice import Candidate
from kvist_router.mind.cost import Cost, prompt_cost, taken_tokens
from kvist_router.mind.replica import Chain, Replica
from kvist_router.tokens.keys import KeyMemo


def candidate(
    replica: Replica, chains: Sequence[Chain], tokens: int, memo: KeyMemo, now: float, feeds: bool = True
) -> Candidate:
    """One replica with its costs for a request of `tokens`, whose prompts are `chains` (none: not known)."""
    cost = _cost(replica, chains, tokens, memo, now, feeds)
    waiting, decoding = replica.busy_with(now)
    return Candidate(
        replica.name,
        cost,
        replica.outstanding_tokens,
        replica.outstanding_requests,
        waiting,
        decoding,
        cost.taken * replica.space_rate(now) if cost.space else 0.0,
    )


def _cost(
    replica: Replica, chains: Sequence[Chain], tokens: int, memo: KeyMemo, now: float, feeds: bool
) -> Cost:
    speeds, queue, chunk = replica.speeds, replica.queue_seconds(now), replica.chunk_tokens
    matches = [replica.match(chain, memo, now, feeds) for chain in chains]
    taken = sum(
        taken_tokens(match, chain.tokens, chunk) for match, chain in zip(matches, chains, strict=True)
    )
    space = max(0.0, replica.space_seconds(now, taken if chains else tokens) - queue)
    if not chains:
        recompute = speeds.prefill.seconds(0, tokens) * speeds.correction
        return Cost(queue, 0.0, 0.0, recompute, 0, space, tokens)
    costs = [
        prompt_cost(match, chain.tokens, chunk, replica.block_tokens, speeds, queue, space)
        for match, chain in zip(matches, chains, strict=True)
    ]
    return costs[0] if len(costs) == 1 else _together(costs)


def _together(costs: Sequence[Cost]) -> Cost:
    """Several prompts of one request: one queue, all loads and computations."""
    return Cost(
        costs[0].queue,
        sum(cost.load for cost in costs),
        max(cost.pending for cost in costs),
        sum(cost.recompute for cost in costs),
        sum(cost.reused for cost in costs),
        costs[0].space,
        sum(cost.taken for cost in costs),
    )
