"""Rates and the queue, around the requests that are under way. Called by mind/mind.py.

    ask(tenant)                   before tokens are counted: raises Refused 429 when its rate is used up
    enter(id, tenant, tokens)     waits for its turn; raises Refused 429 or 503
    leave(id, tokens)             in any case, once; `tokens` of the answer are paid for afterwards

Nobody waits while there is room for one more under way. A request that is tried again keeps no place:
it enters by `again`, without rate or wait, since it has had its turn.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvist_router.access.settings import AdmissionSettings, ShareSettings, TenantSettings
from kvist_router.errors import Refused
from kvist_router.mind.admission.fair import FairQueue, Waiting
from kvist_router.mind.admission.metrics import AdmissionMetrics
from kvist_router.mind.admission.rates import Bucket
from kvist_router.mind.interface import Refusal

_Waits = Waiting[asyncio.Future[Refusal | None]]
MAX_STATES = 4096  # tenants whose rates are remembered; those that a gateway names are not bounded otherwise
_PACE_WEIGHT = 0.05
_LONGEST_RETRY = 60


@dataclass(slots=True)
class _Tenant:
    """What one tenant may use, and has used."""

    name: str
    share: ShareSettings
    requests: Bucket | None = None
    tokens: Bucket | None = None


class Gate:
    """`room` tells how many requests may be under way at once when each replica may have so many."""

    def __init__(
        self,
        settings: AdmissionSettings,
        tenants: Sequence[TenantSettings],
        others: ShareSettings,
        room: Callable[[int], int],
        metrics: AdmissionMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._room = room
        self._metrics = metrics
        self._clock = clock
        self._queue: FairQueue[asyncio.Future[Refusal | None]] = FairQueue()
        self._under_way: dict[str, str] = {}  # tenant by request
        self._called: set[_Waits] = set()  # whose turn it is, and whose task has not gone on yet
        self._states: OrderedDict[str, _Tenant] = OrderedDict()
        self._pace = 0.0  # mean seconds between two that leave
        self._left_at = clock()
        self.use(settings, tenants, others)

    def __len__(self) -> int:
        return len(self._queue)

    def use(
        self, settings: AdmissionSettings, tenants: Sequence[TenantSettings], others: ShareSettings
    ) -> None:
        """Take other settings; what was used stays used."""
        self._settings = settings
        self._named = {tenant.name: tenant for tenant in tenants}
        self._others = others
        self._metrics.keep(self._named)
        for state in self._states.values():
            self._set(state)

    def ask(self, tenant: str) -> None:
        """Take one of its requests; raises Refused when there is none left."""
        bucket, now = self._state(tenant).requests, self._clock()
        if bucket is None:
            return
        wait = bucket.wait(now, 1.0)
        if wait > 0:
            raise self._refused(tenant, "requests", _limited("requests", wait))
        bucket.take(1.0, now)

    async def enter(self, request_id: str, tenant: str, tokens: int) -> bool:
        """Returns when it may go on: whether it has waited. Raises Refused."""
        state, now = self._state(tenant), self._clock()
        if state.tokens is not None and (wait := state.tokens.wait(now, 1.0)) > 0:
            raise self._refused(tenant, "tokens", _limited("tokens", wait))
        share = state.share
        waited = self._full() or len(self._queue) > 0
        if waited:
            await self._wait(Waiting(tenant, share.priority, share.weight, max(1, tokens), _future()))
        self._enter(request_id, tenant, tokens)
        return waited

    def again(self, request_id: str, tenant: str) -> None:
        """A request that has had its turn is sent once more."""
        self._under_way[request_id] = tenant

    def leave(self, request_id: str, tokens: int = 0) -> None:
        """It has ended; `tokens` were answered. Ids that are not under way are ignored."""
        tenant = self._under_way.pop(request_id, None)
        if tenant is None:
            return
        now = self._clock()
        self._pace += _PACE_WEIGHT * (now - self._left_at - self._pace)
        self._left_at = now
        if tokens:
            self._metrics.answered(tenant, tokens)
            self._pay(tenant, tokens)
        self.look()

    def shed(self, tenant: str, ttft: float) -> None:
        """Raise Refused when the predicted TTFT is longer than anybody should wait."""
        limit = self._settings.ttft_seconds
        if limit is not None and ttft > limit:
            text = f"a first token would take {ttft:.0f} s, more than {limit:g} s"
            raise self._refused(tenant, "ttft", _overloaded(text, ttft - limit))

    def look(self) -> None:
        """Let go on whoever has room; also called now and then, since replicas come and go."""
        while len(self._queue) and not self._full():
            first = self._queue.pop()
            if first is None:
                break
            if not first.item.done():
                first.item.set_result(None)
                self._called.add(first)
        self._metrics.wait(len(self._queue))

    async def _wait(self, waiting: _Waits) -> None:
        self._make_place(waiting)
        self._queue.push(waiting)
        started, may = self._clock(), False
        self.look()
        try:
            async with asyncio.timeout(self._settings.seconds):
                refusal = await waiting.item
            may = refusal is None
        except TimeoutError:
            refusal = _overloaded("no replica had room in time", self._retry())
            raise self._refused(waiting.tenant, "late", refusal) from None
        finally:
            self._called.discard(waiting)
            self._queue.remove(waiting)
            if not may:  # its turn, if it had one, is the next one's
                self.look()
        self._metrics.waited.observe(self._clock() - started)
        if refusal is not None:
            raise self._refused(waiting.tenant, "full", refusal)

    def _make_place(self, newcomer: _Waits) -> None:
        if len(self._queue) < self._settings.waiting:
            return
        victim, refusal = self._queue.victim(newcomer), _overloaded("too many requests wait", self._retry())
        if victim is newcomer:
            raise self._refused(newcomer.tenant, "full", refusal)
        self._queue.remove(victim)
        victim.item.set_result(refusal)

    def _full(self) -> bool:
        per_replica = self._settings.per_replica
        return per_replica > 0 and len(self._under_way) + len(self._called) >= self._room(per_replica)

    def _enter(self, request_id: str, tenant: str, tokens: int) -> None:
        self._under_way[request_id] = tenant
        self._metrics.request(tenant, tokens)
        self._pay(tenant, tokens)

    def _pay(self, tenant: str, tokens: int) -> None:
        bucket = self._state(tenant).tokens
        if bucket is not None:
            bucket.take(tokens, self._clock())

    def _retry(self) -> float:
        return self._pace * len(self._queue)

    def _refused(self, tenant: str, reason: str, refusal: Refusal) -> Refused:
        self._metrics.refused(tenant, reason)
        return Refused(refusal)

    def _state(self, tenant: str) -> _Tenant:
        state = self._states.get(tenant)
        if state is None:
            state = self._states[tenant] = _Tenant(tenant, self._others)
            self._set(state)
            if len(self._states) > MAX_STATES:
                self._states.popitem(last=False)
        else:
            self._states.move_to_end(tenant)
        return state

    def _set(self, state: _Tenant) -> None:
        share = state.share = self._named.get(state.name, self._others)
        state.requests = self._bucket(state.requests, share.requests_per_minute)
        state.tokens = self._bucket(state.tokens, share.tokens_per_minute)

    def _bucket(self, old: Bucket | None, per_minute: float | None) -> Bucket | None:
        if per_minute is None:
            return None
        if old is None:
            return Bucket(per_minute, self._clock())
        old.change(per_minute, self._clock())
        return old


def _future() -> asyncio.Future[Refusal | None]:
    return asyncio.get_running_loop().create_future()


def _limited(what: str, wait: float) -> Refusal:
    text, seconds = f"this tenant's {what} of a minute are used up", max(1, math.ceil(wait))
    return Refusal(429, text, "rate_limit_error", code="rate_limit_exceeded", retry_after=seconds)


def _overloaded(text: str, wait: float) -> Refusal:
    seconds = min(_LONGEST_RETRY, max(1, math.ceil(wait)))
    return Refusal(503, text, "service_unavailable", code="overloaded", retry_after=seconds)
