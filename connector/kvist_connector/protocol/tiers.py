"""Tier numbers, as they travel, and the order in which tiers are preferred."""

from collections.abc import Iterable
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
# Another agent's memory is nearer than a server that keeps chunks for all.
PREFERENCE: Final = (Tier.GPU, Tier.MEMORY, Tier.DISK, Tier.PEER, Tier.REDIS, Tier.OBJECT)


def preferred(tiers: Iterable[Tier]) -> list[Tier]:
    """Sorted, the one to read from first."""
    return sorted(tiers, key=PREFERENCE.index)
