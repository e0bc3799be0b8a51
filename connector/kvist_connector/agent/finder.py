"""Which leading chunks of a prompt can be had: what this agent knows, then what shared tiers answer.

Called by the loader and by the lookup control. What lies in the arena or on this agent's own
disk is sure; what lies in a shared tier is asked for anew each time, tier by tier, and only
from the first chunk on that is not sure.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.lower import LowerTier
from kvist_connector.agent.shared import ROOT, SharedTier
from kvist_connector.protocol.tiers import Tier


class Finder:
    """`find` never takes longer than the shared tiers' deadlines for a lookup together."""

    def __init__(self, catalog: Catalog, lower: Mapping[Tier, LowerTier]) -> None:
        self._catalog = catalog
        shared = [tier for tier in lower.values() if isinstance(tier, SharedTier)]
        self._tiers = [tier for tier in shared if tier.searched]
        self._shared = {tier.tier for tier in shared}
        self._deadline = sum(tier.lookup_deadline for tier in self._tiers)
        self.counts: Counter[str] = Counter()

    @property
    def shared(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._tiers)

    def known(self, keys: Sequence[bytes]) -> tuple[list[Chunk], int]:
        """Leading chunks that are sure, and how many of them are in memory before the first that is not."""
        found = self._catalog.leading(keys)
        lead = len(found)
        for key in keys[lead:]:
            chunk = self._catalog.get(key)
            if chunk is None or not self._is_sure(chunk):
                break
            found.append(chunk)
        return found, lead

    async def find(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Leading chunks that can be had now; those found in shared tiers are in the catalog."""
        position = self._sure(keys, 0)
        stopped: dict[Tier, int] = {}
        try:
            async with asyncio.timeout(self._deadline):
                while position < len(keys):
                    more = await self._ask(keys, position, stopped)
                    if not more:
                        break
                    position = self._sure(keys, position + more)
        except TimeoutError:
            self.counts["lookups_asked_late"] += 1
        return self._leading(keys[:position])

    async def _ask(self, keys: Sequence[bytes], position: int, stopped: dict[Tier, int]) -> int:
        """Chunks from `position` on that the first tier with any has; `stopped`: where each had no more."""
        before = keys[position - 1] if position else ROOT
        for tier in self._tiers:
            if stopped.get(tier.tier) == position:
                continue
            found = await tier.find(keys[position:], before, position)
            stopped[tier.tier] = position + found
            if found:
                return found
        return 0

    def _sure(self, keys: Sequence[bytes], position: int) -> int:
        while position < len(keys):
            chunk = self._catalog.get(keys[position])
            if chunk is None or not self._is_sure(chunk):
                break
            position += 1
        return position

    def _is_sure(self, chunk: Chunk) -> bool:
        return chunk.ref is not None or bool(chunk.below - self._shared)

    def _leading(self, keys: Sequence[bytes]) -> list[Chunk]:
        found = []
        for key in keys:
            chunk = self._catalog.get(key)
            if chunk is None:
                break
            found.append(chunk)
        return found
