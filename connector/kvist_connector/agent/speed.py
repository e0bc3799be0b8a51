"""Measured price of a tier: moving estimate of its bandwidth, as whole batches saw it."""

from __future__ import annotations

from typing import Final

from kvist_connector.planner import SHARED_PRICES, TierPrice
from kvist_connector.protocol.tiers import Tier

# Until something was read: modest, so that a first hit is not bet on a fast one.
_PRIOR: Final = TierPrice(latency=0.002, bandwidth=500e6)
_WEIGHT = 0.3


class Speed:
    """Bandwidth by exponentially weighted mean; the latency is the prior's."""

    def __init__(self, prior: TierPrice = _PRIOR) -> None:
        self.price = prior

    @classmethod
    def of(cls, tier: Tier) -> Speed:
        """With the prior of this kind of tier."""
        return cls(SHARED_PRICES.get(tier, _PRIOR))

    def observe(self, size: int, seconds: float) -> None:
        """A batch of `size` bytes took `seconds` in all."""
        if size <= 0:
            return
        moving = max(seconds - self.price.latency, seconds / 4, 1e-6)
        bandwidth = self.price.bandwidth + _WEIGHT * (size / moving - self.price.bandwidth)
        self.price = TierPrice(self.price.latency, bandwidth)
