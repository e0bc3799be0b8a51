"""What a request would cost on one replica, and others because of it. Called by mind/mind.py.

Reads the replica, changes nothing. `choice.delays` and the policies weigh what is gathered here.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist_router.mind.choice import Candidate
from kvist_router.mind.cost import PRIOR_PREFILL, Cost, prompt_cost, taken_tokens
from kvist_router.mind.replica import Busy, Replica
from kvist_router.tokens.keys import Chain, KeyMemo

CROWDING = 4  # the chance that KV space will be wanted and not there: its used share to this power


def candidate(
    replica: Replica, chains: Sequence[Chain], tokens: int, memo: KeyMemo, now: float, feeds: bool = True
) -> Candidate:
    """One replica with its costs for a request of `tokens`, whose prompts are `chains` (none: not known)."""
    busy = replica.busy(now)
    if len(chains) == 1:  # nearly always, and for every replica of every request
        chain, chunk, speeds = chains[0], replica.chunk_tokens, replica.speeds
        match = replica.match(chain, memo, now, feeds)
        taken = taken_tokens(match, chain.tokens, chunk) if busy.space_total else 0
        queue = speeds.prefill.linear * busy.prefill_tokens * speeds.correction
        space = busy.space_seconds(taken, queue) if busy.space_total else 0.0
        cost = prompt_cost(match, chain.tokens, chunk, replica.block_tokens, speeds, queue, space)
    else:
        cost, taken = _together(replica, busy, chains, tokens, memo, now, feeds)
    elsewhere = replica.elsewhere
    return Candidate(
        replica.name,
        cost,
        replica.outstanding_tokens + elsewhere.tokens,
        replica.outstanding_requests + elsewhere.requests,
        busy.waiting,
        busy.decoding,
        taken * busy.kept_rate * busy.crowded**CROWDING if busy.space_total else 0.0,
        replica.lately.tokens(now),
        tokens,
    )


def unknown(replica: Replica, tokens: int) -> Candidate:
    """A replica whose own figures cannot be calculated with: nothing is reused, at the prior speed."""
    recompute = PRIOR_PREFILL.seconds(0, tokens)
    cost = Cost.of(0.0, 0.0, 0.0, recompute, 0)
    return Candidate(replica.name, cost, replica.outstanding_tokens, replica.outstanding_requests)


def _together(
    replica: Replica,
    busy: Busy,
    chains: Sequence[Chain],
    tokens: int,
    memo: KeyMemo,
    now: float,
    feeds: bool,
) -> tuple[Cost, int]:
    """Several prompts of one request: one queue, all loads and computations; and the KV space they take."""
    speeds, chunk = replica.speeds, replica.chunk_tokens
    matched = [(chain.tokens, replica.match(chain, memo, now, feeds)) for chain in chains]
    taken = sum(taken_tokens(match, length, chunk) for length, match in matched) if matched else tokens
    queue = speeds.prefill.linear * busy.prefill_tokens * speeds.correction
    space = busy.space_seconds(taken, queue)
    costs = [
        prompt_cost(match, length, chunk, replica.block_tokens, speeds, queue, space)
        for length, match in matched
    ]
    recompute = sum(cost.recompute for cost in costs)
    if not costs:
        recompute = speeds.prefill.seconds(0, tokens) * speeds.correction
    load, reused = sum(cost.load for cost in costs), sum(cost.reused for cost in costs)
    pending = max((cost.pending for cost in costs), default=0.0)
    return Cost.of(queue, load, pending, recompute, reused, space), taken
