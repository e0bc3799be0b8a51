"""What the shared tiers hold, by the word of any replica: a chunk in Redis is there for all that read it.

Called by mind/mirror.py, one for all mirrors of a router, whose replicas are one cluster with the same
servers. A key counts as long as one mirror has it there, so this map is at most as large as the mirrors and
ends with them. A key is of one fingerprint: replicas that compute otherwise never meet here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvist_connector.protocol.tiers import SHARED_TIERS

SHARED_BITS: Final = sum(1 << tier for tier in SHARED_TIERS)
# For bytes.translate: whether the key is there -> mask of the tier.
_MASKS: Final = {tier: bytes([0, 1 << tier]) + bytes(254) for tier in SHARED_TIERS}


class SharedKeys:
    """Counts the mirrors that hold a key in a tier: each takes back its own word only."""

    def __init__(self) -> None:
        self._told: dict[int, dict[bytes, int]] = {1 << tier: {} for tier in SHARED_TIERS}

    def told(self, bit: int, keys: Iterable[bytes]) -> None:
        """A mirror has these in the tier of `bit`, and had not."""
        counts = self._told[bit]
        for key in keys:
            counts[key] = counts.get(key, 0) + 1

    def taken_back(self, bit: int, keys: Iterable[bytes]) -> None:
        """A mirror has these there no more."""
        counts = self._told[bit]
        for key in keys:
            left = counts.get(key, 0) - 1
            if left > 0:
                counts[key] = left
            else:
                counts.pop(key, None)

    def has(self, key: bytes, bits: int) -> bool:
        """Whether one of the tiers in `bits` holds the key."""
        return any(bits & bit and key in counts for bit, counts in self._told.items())

    def masks(self, keys: Sequence[bytes], bits: int) -> bytes:
        """The tiers among `bits` that hold each key, a mask a byte; loops in C."""
        found = 0
        for tier in SHARED_TIERS:
            bit = 1 << tier
            if bits & bit:
                here = bytes(map(self._told[bit].__contains__, keys)).translate(_MASKS[tier])
                found |= int.from_bytes(here)
        return found.to_bytes(len(keys))

    def __len__(self) -> int:
        return sum(map(len, self._told.values()))
