"""Measured price of a tier: moving estimate of its speed, as whole batches saw it.

Averaged are seconds per byte and not bytes per second: what is predicted from it is a time, and a
link that became a hundred times slower is believed after a few batches. A tier that was found too slow is not
read from, so nothing would ever correct that: now and then it is due to be measured beside the requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvist_connector.planner import SHARED_PRICES, TierPrice
from kvist_connector.protocol.tiers import Tier

# Until something was read: modest, so that a first hit is not bet on a fast one.
_PRIOR: Final = TierPrice(latency=0.002, bandwidth=500e6)
_WEIGHT: Final = 0.3  # of the newest batch, once there were others
_MEASURED_AGAIN: Final = 30.0  # seconds after the last batch, if nobody reads
_SHARE: Final = 0.05  # of the time, at most, that measuring a slow tier takes


class Speed:
    """The latency is the prior's. `clock` in seconds."""

    def __init__(self, prior: TierPrice = _PRIOR, clock: Callable[[], float] = time.monotonic) -> None:
        self._prior = prior
        self._clock = clock
        self._pace = 1 / prior.bandwidth
        self._batches = 0
        self._seen = clock()
        self._took = 0.0  # the last batch

    @classmethod
    def of(cls, tier: Tier) -> Speed:
        """With the prior of this kind of tier."""
        return cls(SHARED_PRICES.get(tier, _PRIOR))

    @property
    def price(self) -> TierPrice:
        """Now."""
        return TierPrice(self._prior.latency, 1 / self._pace)

    def observe(self, size: int, seconds: float) -> None:
        """A batch of `size` bytes took `seconds` in all."""
        if size <= 0:
            return
        moving = max(seconds - self._prior.latency, seconds / 4, 1e-6)
        weight = max(_WEIGHT, 1 / (self._batches + 2))  # the prior counts as one batch
        self._pace += weight * (moving / size - self._pace)
        self._batches += 1
        self._seen, self._took = self._clock(), seconds

    def due(self) -> bool:
        """Whether to read something now only to measure; then not again for a while."""
        now = self._clock()
        if now - self._seen < max(_MEASURED_AGAIN, self._took / _SHARE):
            return False
        self._seen = now
        return True
