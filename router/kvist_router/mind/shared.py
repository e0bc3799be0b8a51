"""What replicas can read from elsewhere: shared tiers, by the word of any replica, and the memory of peers.

Called by mind/mirror.py, one for all mirrors of a router, whose replicas are one cluster with the same
servers. A key counts as long as one mirror has it there, so this map is at most as large as the mirrors and
ends with them. A key is of one fingerprint: replicas that compute otherwise never meet here. What is in the
memory of peers is not counted but asked of their mirrors, once for all replicas of a decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final, Protocol

from kvist_connector.protocol.tiers import SHARED_TIERS, Tier

SHARED_BITS: Final = sum(1 << tier for tier in SHARED_TIERS)
PEER_BIT: Final = 1 << Tier.PEER
MEMORY_BIT: Final = 1 << Tier.MEMORY
# For bytes.translate: whether the key is there -> mask of the tier.
_MASKS: Final = {tier: bytes([0, 1 << tier]) + bytes(254) for tier in SHARED_TIERS}
# And of a peer's mask: whether it has the key in memory.
_LENT: Final = bytes(PEER_BIT if mask & MEMORY_BIT else 0 for mask in range(256))


class Lender(Protocol):
    """A mirror whose replica's memory others may read."""

    @property
    def tiers(self) -> Mapping[bytes, int]:
        """Its keys, with the tiers that hold them as a mask."""


class SharedKeys:
    """Counts the mirrors that hold a key in a tier: each takes back its own word only."""

    def __init__(self) -> None:
        self._lenders: list[Lender] = []
        self._version = 0
        self._lent: tuple[Sequence[bytes], int, int] = ((), -1, 0)
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

    def lends(self, mirror: Lender) -> None:
        """Its replica is there."""
        if mirror not in self._lenders:
            self._lenders.append(mirror)

    def lends_no_more(self, mirror: Lender) -> None:
        """It is gone."""
        if mirror in self._lenders:
            self._lenders.remove(mirror)
        self.changed()

    def changed(self) -> None:
        """Some mirror did."""
        self._version += 1

    def at_peers(self, keys: Sequence[bytes]) -> int:
        """Keys in the memory of some replica, as masks of a byte each.

        Only who has the first is asked for all: in memory no chunk is without the one before it.
        """
        asked, version, found = self._lent
        if asked is keys and version == self._version:
            return found
        found = 0
        for tiers in (lender.tiers for lender in self._lenders):
            if tiers.get(keys[0], 0) & MEMORY_BIT:
                found |= int.from_bytes(bytes(map(tiers.get, keys, repeat(0))).translate(_LENT))
        self._lent = (keys, self._version, found)
        return found

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
        if bits & PEER_BIT:
            found |= self.at_peers(keys)
        return found.to_bytes(len(keys))

    def __len__(self) -> int:
        return sum(map(len, self._told.values()))
