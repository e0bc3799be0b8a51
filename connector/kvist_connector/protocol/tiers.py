"""Tier numbers, as they travel; the order is the order of preference."""

from enum import IntEnum
from typing import Final


class Tier(IntEnum):
    """Where a chunk is. GPU residency is per engine block, all others per chunk."""

    GPU = 0
    MEMORY = 1
    DISK = 2
    REDIS = 3
    OBJECT = 4
    PEER = 5

    @property
    def label(self) -> str:
        """The name in metrics, JSON and messages."""
        return self.name.lower()


# They belong to the whole cluster: what one agent put there every other one can read.
SHARED_TIERS: Final = (Tier.REDIS, Tier.OBJECT)
