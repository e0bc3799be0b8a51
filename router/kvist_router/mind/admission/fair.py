"""The order in which waiting requests go on. Pure; called by gate.py.

Strict between priorities, the lowest number first. Within one, deficit round robin (Shreedhar and Varghese,
"Efficient Fair Queuing Using Deficit Round Robin", SIGCOMM 1995) over tokens: every round gives a tenant
`weight * QUANTUM` tokens, and it sends requests while it can pay for them. A tenant that has nothing
waiting saves nothing. So while tenants wait, what any two of them get differs from their weights by
no more than a quantum and a longest request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

QUANTUM = 4096  # tokens of a round, for weight 1
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiting(Generic[T]):
    """One request that waits; `cost` in tokens, at least 1."""

    tenant: str
    priority: int
    weight: float
    cost: int
    item: T
    queued: bool = False


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """What one tenant has waiting in one priority, oldest first."""

    weight: float
    waiting: deque[Waiting[T]] = field(default_factory=deque)
    deficit: float = 0.0
    cost: int = 0  # of all that wait

    @property
    def rounds(self) -> int:
        """How many rounds it needs until its first can go."""
        missing = self.waiting[0].cost - self.deficit
        return max(0, math.ceil(missing / (QUANTUM * self.weight)))


class FairQueue(Generic[T]):
    """`push`, then `pop` until it gives None; `remove` whoever gives up."""

    def __init__(self) -> None:
        self._rings: dict[int, dict[str, _Flow[T]]] = {}  # a ring's first tenant is whose turn it is
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, waiting: Waiting[T]) -> None:
        """At the end of its tenant's line."""
        ring = self._rings.setdefault(waiting.priority, {})
        flow = ring.setdefault(waiting.tenant, _Flow(waiting.weight))
        flow.weight = waiting.weight
        flow.waiting.append(waiting)
        flow.cost += waiting.cost
        waiting.queued = True
        self._count += 1

    def pop(self) -> Waiting[T] | None:
        """Whose turn it is; None when nobody waits."""
        if not self._rings:
            return None
        ring = self._rings[min(self._rings)]
        self._turn(ring)
        flow = next(iter(ring.values()))
        first = flow.waiting[0]
        flow.deficit -= first.cost
        self.remove(first)
        return first

    def remove(self, waiting: Waiting[T]) -> None:
        """Take one out, if it is in."""
        if not waiting.queued:
            return
        waiting.queued = False
        ring = self._rings[waiting.priority]
        flow = ring[waiting.tenant]
        flow.waiting.remove(waiting)
        flow.cost -= waiting.cost
        self._count -= 1
        if not flow.waiting:
            del ring[waiting.tenant]
        if not ring:
            del self._rings[waiting.priority]

    def victim(self, newcomer: Waiting[T]) -> Waiting[T]:
        """Who is refused when one more is too many: of the last priority the tenant with most tokens waiting
        for its weight, its newest request. It may be the newcomer."""
        last = max(newcomer.priority, *self._rings) if self._rings else newcomer.priority
        found, most = newcomer, newcomer.cost / newcomer.weight if newcomer.priority == last else 0.0
        for tenant, flow in self._rings.get(last, {}).items():
            own = tenant == newcomer.tenant and newcomer.priority == last
            share = (flow.cost + newcomer.cost * own) / flow.weight
            if share > most:
                found, most = (newcomer if own else flow.waiting[-1]), share
        return found

    def __iter__(self) -> Iterator[Waiting[T]]:
        """All that wait, in no order."""
        for ring in self._rings.values():
            for flow in ring.values():
                yield from flow.waiting

    def _turn(self, ring: dict[str, _Flow[T]]) -> None:
        """Bring the tenant to the front that can pay for its first request."""
        idle = min(flow.rounds for flow in ring.values()) - 1
        if idle > 0:  # rounds in which nobody could pay yet
            for flow in ring.values():
                flow.deficit += idle * QUANTUM * flow.weight
        while True:
            tenant, flow = next(iter(ring.items()))
            if flow.deficit >= flow.waiting[0].cost:
                return
            flow.deficit += QUANTUM * flow.weight
            del ring[tenant]
            ring[tenant] = flow
