"""Predicted time to first token of a prompt on one replica. Pure; called by mind/pricing.py.

    TTFT = queue + space + load + pending + recompute
    queue      prefill tokens waiting there before us, at the replica's prefill speed
    space      time until the engine's KV space has room, beyond the queue
    load       chunks that come from memory or a lower tier, at the tier's measured price
    pending    time until chunks that another request computes there are ready, beyond the queue
    recompute  prefill of the rest

Prices and prefill speed are the feed's; without figures a prior. Seconds, tokens, bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from kvist_connector.planner import SHARED_PRICES, PrefillModel, TierPrice, plan_load
from kvist_connector.protocol.tiers import Tier
from kvist_router.mind.mirror import Hit

# Priors until a feed has figures: the order of magnitude of a small model on one accelerator.
PRIOR_PREFILL = PrefillModel(linear=1e-4)
PRIOR_CHUNK_BYTES = 8 * 2**20
PRIOR_PRICES: Mapping[int, TierPrice] = {
    Tier.MEMORY: TierPrice(0.0005, 8e9),
    Tier.DISK: TierPrice(0.002, 1e9),
    **SHARED_PRICES,
}
_MEMORY_TIER = int(Tier.MEMORY)
_MEMORY = bytes([_MEMORY_TIER])
UNMEASURED_LOAD = 0.5
CORRECTION_RANGE = (0.5, 2.0)
CORRECTION_WEIGHT = 0.02  # a faster one follows noise, and sends everything where it fell last


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast a replica is."""

    prefill: PrefillModel = PRIOR_PREFILL
    prices: Mapping[int, TierPrice] = field(default_factory=lambda: PRIOR_PRICES)
    chunk_bytes: int = PRIOR_CHUNK_BYTES
    measured: bool = True  # whether `prefill` is the engine's own figure
    correction: float = 1.0  # observed over predicted, clipped to CORRECTION_RANGE

    def price(self, tier: int) -> TierPrice:
        """Measured price of a tier, else its prior."""
        return self.prices.get(tier) or PRIOR_PRICES[tier]


class Match(msgspec.Struct, frozen=True, gc=False):
    """What a replica would reuse of one prompt."""

    hit: Hit
    gpu_tokens: int  # leading tokens on the GPU, partial tail included
    pending_chunks: int = 0  # chunks after the hit that another request computes there
    pending_ready: float = 0.0  # seconds from now until they are ready


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Seconds of each part, and the tokens that will not be computed."""

    queue: float
    load: float
    pending: float
    recompute: float
    reused: int
    space: float
    total: float  # predicted seconds to the first token

    @classmethod
    def of(
        cls, queue: float, load: float, pending: float, recompute: float, reused: int, space: float = 0.0
    ) -> Cost:
        """From the parts."""
        total = queue + space + load + pending + recompute
        return cls(queue, load, pending, recompute, reused, space, total)


def prompt_cost(
    match: Match,
    tokens: int,
    chunk_tokens: int,
    block_tokens: int,
    speeds: Speeds,
    queue: float,
    space: float = 0.0,
) -> Cost:
    """Cost of one prompt of `tokens` behind `queue` seconds of other prefill and `space` more of waiting.

    The engine computes at least the last token, and reuses whole blocks only. One that has not
    measured its prefill loads all that it can (planner.py), so the prior does not decide that here: it
    may be many times too fast, and would send a conversation away from its chunks on disk.
    """
    most = max(0, tokens - 1) // block_tokens * block_tokens
    reused = gpu = min(match.gpu_tokens, most)
    load = pending = 0.0
    if len(match.hit.stored) > gpu // chunk_tokens:
        chunks, load = _loaded(match.hit.stored, gpu // chunk_tokens, chunk_tokens, speeds)
        reused = max(gpu, min(chunks * chunk_tokens, most))
    if match.pending_chunks:
        reused = max(reused, min((match.hit.chunks + match.pending_chunks) * chunk_tokens, most))
        pending = max(0.0, match.pending_ready - queue - space)
    if load and not speeds.measured:
        load = min(load, UNMEASURED_LOAD * speeds.prefill.seconds(gpu, reused))
    recompute = speeds.prefill.seconds(reused, tokens) * speeds.correction
    return Cost.of(queue, load, pending, recompute, reused, space)


def taken_tokens(match: Match, tokens: int, chunk_tokens: int) -> int:
    """KV space that a prompt takes: tokens neither on the GPU nor about to be computed there for another."""
    taken = tokens - match.gpu_tokens - match.pending_chunks * chunk_tokens
    return taken if taken > 0 else 0


def _loaded(stored: bytes, first: int, chunk_tokens: int, speeds: Speeds) -> tuple[int, float]:
    """Leading chunks after loading, and its seconds. Resident ones always load, lower tiers if it pays."""
    resident = len(stored) - len(stored[first:].lstrip(_MEMORY))
    load = speeds.price(_MEMORY_TIER).seconds((resident - first) * speeds.chunk_bytes)
    if resident == len(stored):
        return resident, load
    sizes = [(speeds.price(tier), speeds.chunk_bytes) for tier in stored[resident:]]
    plan = plan_load(sizes, speeds.prefill if speeds.measured else None, chunk_tokens, resident)
    return resident + plan.chunks, load + plan.load_seconds


def corrected(
    correction: float, predicted: float, observed: float, weight: float = CORRECTION_WEIGHT
) -> float:
    """Move a correction towards observed over predicted; clipped, so that one outlier does not steer."""
    if predicted <= 0 or observed <= 0:
        return correction
    low, high = CORRECTION_RANGE
    ratio = min(high, max(low, correction * observed / predicted))
    return min(high, max(low, correction + weight * (ratio - correction)))
