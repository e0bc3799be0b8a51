"""How much each tenant may hold in the memory and on the disk of one agent. Called by core.py, on its loop.

A router marks the requests of tenants that have a quota with two reserved tags (protocol/tags.py): whose the
chunks are, which stays with them, and how many tokens that tenant may hold, which does not. So a quota
changes with the next request, and agents need no settings of tenants. Where a store would exceed it, the
tenant's own oldest chunks go first, those at the ends of their chains; if none may go the store is refused.
Chunks in shared tiers do not count: they are no one agent's.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.lower import LowerTier
from kvist_connector.agent.memory import MemoryTier
from kvist_connector.protocol.tags import QUOTA, TENANT
from kvist_connector.protocol.tiers import Tier

MAX_TENANTS: Final = 4096  # remembered; of those heard of longest ago the next request reminds
# Uses within so many seconds count as one, so that of a chain used at once its end goes first.
ALIKE_SECONDS: Final = 16.0
_SHOWN: Final = 256  # in stats
_LOOKS: Final = 512  # chunks looked at for one that may go
_LEAST_STORES: Final = 64  # between two counts of what a tenant holds
_SHARE: Final = 8  # stores between two counts, as a share of what is held


@dataclass(slots=True)
class _Tenant:
    limit: int = 0  # tokens
    held: int = 0  # chunks, as last counted and stored since
    stores: int = 0  # until they are counted anew
    order: list[tuple[int, int, bytes]] = field(default_factory=list)  # heap: last use, -index, key


class Quotas:
    """`own`: the lower tiers that belong to this agent alone."""

    def __init__(
        self,
        memory: MemoryTier,
        catalog: Catalog,
        own: Mapping[Tier, LowerTier],
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._own = own
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def learn(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        """What of a request's tags stays with its chunks; a quota in them holds from now on."""
        limit = next((tag for tag in tags if tag.startswith(QUOTA)), None)
        if limit is None:
            return tags
        tenant = _tenant(tags)
        tokens = limit.removeprefix(QUOTA)
        if tenant is not None and tokens.isdecimal():
            self._remember(tenant).limit = int(tokens)
        return tuple(tag for tag in tags if not tag.startswith(QUOTA))

    def admit(self, tags: Iterable[str]) -> bool:
        """Whether one more chunk with these tags may be stored; room is made for it."""
        name = _tenant(tags)
        tenant = self._tenants.get(name) if name is not None else None
        layout = self._memory.layout
        if name is None or tenant is None or layout is None:
            return True
        most = tenant.limit // layout.chunk_tokens
        if self._catalog.count(name) < most:
            return True
        if tenant.stores <= 0:
            self._count(name, tenant)
        while tenant.held >= most:
            if not self._give_up_one(tenant):
                self.counts["quota_refused"] += 1
                return False
        return True

    def stored(self, chunk: Chunk) -> None:
        """A chunk is in memory now."""
        name = _tenant(chunk.tags)
        tenant = self._tenants.get(name) if name is not None else None
        if tenant is not None:
            tenant.held += 1
            tenant.stores -= 1
            heapq.heappush(tenant.order, _rank(chunk))

    def stats(self) -> dict[str, dict[str, int]]:
        """Tokens that tenants with a quota hold, and may hold; of those heard of last."""
        layout = self._memory.layout
        chunk_tokens = layout.chunk_tokens if layout is not None else 0
        latest = list(self._tenants)[-_SHOWN:]
        return {
            name.removeprefix(TENANT): {
                "tokens": self._catalog.count(name) * chunk_tokens,
                "cache_tokens": self._tenants[name].limit,
            }
            for name in latest
        }

    def _remember(self, name: str) -> _Tenant:
        tenant = self._tenants.setdefault(name, _Tenant())
        self._tenants.move_to_end(name)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return tenant

    def _count(self, name: str, tenant: _Tenant) -> None:
        """Chunks leave in many ways, so what is held is counted again now and then."""
        found = map(self._catalog.get, self._catalog.with_tag(name))
        chunks = [chunk for chunk in found if chunk is not None and self._holds(chunk)]
        tenant.order = [_rank(chunk) for chunk in chunks]
        heapq.heapify(tenant.order)
        tenant.held = len(chunks)
        tenant.stores = max(_LEAST_STORES, len(chunks) // _SHARE)

    def _holds(self, chunk: Chunk) -> bool:
        return chunk.ref is not None or any(tier in chunk.below for tier in self._own)

    def _give_up_one(self, tenant: _Tenant) -> bool:
        now = int(self._clock() // ALIKE_SECONDS)
        for _ in range(min(_LOOKS, len(tenant.order))):
            used, depth, key = heapq.heappop(tenant.order)
            chunk = self._catalog.get(key)
            if chunk is None or not self._holds(chunk):
                continue
            last = _rank(chunk)
            if last[0] > used:
                heapq.heappush(tenant.order, last)
            elif not self._may_go(chunk):
                heapq.heappush(tenant.order, (now + 1, depth, key))
            else:
                self._drop(chunk)
                tenant.held -= 1
                return True
        return False

    def _may_go(self, chunk: Chunk) -> bool:
        tiers = [tier for tier in (Tier.MEMORY, *self._own) if chunk.key in self._catalog.index(tier)]
        return all(self._catalog.index(tier).may_go(chunk.key) for tier in tiers)

    def _drop(self, chunk: Chunk) -> None:
        self.counts["quota_evicted"] += 1
        for tier in self._own.values():
            tier.drop(chunk.key)
        if chunk.ref is not None:
            self._memory.drop(chunk)


def _rank(chunk: Chunk) -> tuple[int, int, bytes]:
    return int(chunk.used // ALIKE_SECONDS), -chunk.index, chunk.key


def _tenant(tags: Iterable[str]) -> str | None:
    return next((tag for tag in tags if tag.startswith(TENANT)), None)
