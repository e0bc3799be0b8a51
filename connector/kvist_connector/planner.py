"""Load or recompute: pure arithmetic, shared by agent, router and tools. Torch-free.

    load(n)      = latency + bytes(n) / bandwidth of the tier
    recompute(n) = a * n + b * ((start + n)^2 - start^2)   for n tokens after `start`

The quadratic term is attention over everything before; a and b are measured by
the engine adapter (`PrefillModel.fit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvist_connector.protocol.tiers import Tier


@dataclass(frozen=True)
class PrefillModel:
    """Prefill cost of one engine. Seconds per token and per squared token."""

    linear: float
    quadratic: float = 0.0

    def seconds(self, start: int, end: int) -> float:
        """Time to compute tokens start..end of a prompt whose first `start` are cached."""
        if end <= start:
            return 0.0
        return self.linear * (end - start) + self.quadratic * (end * end - start * start)


@dataclass(frozen=True)
class TierPrice:
    """Measured speed of a tier: seconds until the first byte, then bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, size: int) -> float:
        """Time to bring `size` bytes into the arena; 0 bytes cost nothing."""
        if size <= 0:
            return 0.0
        return self.latency + size / self.bandwidth if self.bandwidth > 0 else float("inf")


# Of shared tiers nobody has read from yet: agents and routers must expect the same.
SHARED_PRICES: Final[Mapping[int, TierPrice]] = {
    Tier.PEER: TierPrice(0.003, 1e9),
    Tier.REDIS: TierPrice(0.003, 5e8),
    Tier.OBJECT: TierPrice(0.05, 2e8),
}


@dataclass(frozen=True)
class Plan:
    """How many leading chunks to load, and what was compared."""

    chunks: int
    load_seconds: float
    saved_seconds: float
    reason: str


def plan_load(
    sizes: Sequence[tuple[TierPrice, int]],
    prefill: PrefillModel | None,
    chunk_tokens: int,
    start_chunk: int = 0,
) -> Plan:
    """Choose the number of leading chunks whose loading saves most time.

    `sizes`: for every available chunk after `start_chunk`, in order, the tier it
    would come from and its bytes. Chunks of one tier are read in one batch, so its
    latency counts once. Without a measured prefill everything is loaded: an
    engine that has never computed has no figure to compare with.
    """
    if not sizes:
        return Plan(0, 0.0, 0.0, "nothing to load")
    if prefill is None or prefill.linear <= 0:
        total = _load_seconds(sizes)
        return Plan(len(sizes), total, 0.0, "prefill speed unknown: load all")
    best, best_gain, best_load, best_saved = 0, 0.0, 0.0, 0.0
    for n in range(1, len(sizes) + 1):
        load = _load_seconds(sizes[:n])
        saved = prefill.seconds(start_chunk * chunk_tokens, (start_chunk + n) * chunk_tokens)
        if saved - load > best_gain:
            best, best_gain, best_load, best_saved = n, saved - load, load, saved
    reason = "loading beats recomputing" if best else "recomputing is faster"
    return Plan(best, best_load, best_saved, reason)


def _load_seconds(sizes: Sequence[tuple[TierPrice, int]]) -> float:
    by_tier: dict[TierPrice, int] = {}
    for price, size in sizes:
        by_tier[price] = by_tier.get(price, 0) + size
    return sum(price.seconds(size) for price, size in by_tier.items())


def break_even_bandwidth(prefill: PrefillModel, tokens: int, size: int, latency: float = 0.0) -> float | None:
    """Bytes per second above which loading a prompt of `tokens` and `size` bytes beats computing it.

    None: the first byte alone comes later than the computed result.
    """
    left = prefill.seconds(0, tokens) - latency
    return size / left if left > 0 else None
