"""The Lease that decides which operator acts.

`next_step` is the decision, `Elector` carries it out. An operator trusts only its own clock: another's
lease has run out when this one saw no change of it for `duration` seconds. Its own it holds until
`duration` after the *start* of the last renewal that succeeded, less a margin; writes are fenced by that
(fenced.py), so the holder stops before anyone can take over.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvist_operator.control.api import Api
from kvist_operator.control.errors import ApiError, Conflict
from kvist_operator.control.resources import LEASES, Object

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTerms:
    """A takeover after a kill takes at most duration + retry seconds."""

    namespace: str
    name: str
    identity: str
    duration: float = 15.0
    renew: float = 5.0  # pause between renewals of the holder
    retry: float = 2.0  # pause between looks of the others
    margin: float = 2.0  # the holder's writes end this long before the lease does


class Step(StrEnum):
    """What to do with the lease now."""

    CREATE = "create"
    TAKE = "take"
    RENEW = "renew"
    WAIT = "wait"


@dataclass(frozen=True)
class Seen:
    """A lease as last observed: the version, and when on this clock it was first seen so."""

    version: str
    since: float


def next_step(lease: Object | None, seen: Seen | None, terms: LeaseTerms, now: float) -> Step:
    """Pure: `seen` is the observation of this very version."""
    if lease is None:
        return Step.CREATE
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity")
    if holder == terms.identity:
        return Step.RENEW
    if not holder:
        return Step.TAKE
    wait = float(spec.get("leaseDurationSeconds") or terms.duration)
    return Step.TAKE if seen is not None and now - seen.since >= wait else Step.WAIT


class Elector:
    """Runs the election."""

    def __init__(
        self,
        api: Api,
        terms: LeaseTerms,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._terms = terms
        self._changed = asyncio.Event()
        self._clock = clock if clock is not None else asyncio.get_running_loop().time
        self._sleep = sleep
        self._seen: Seen | None = None
        self._lease: Object | None = None
        self._until = float("-inf")
        self._heard = float("-inf")
        self._absent = float("inf")  # since when there is no lease
        self._told = False

    def remaining(self) -> float:
        """Seconds for which this operator is certainly the only one that acts."""
        return self._until - self._terms.margin - self._clock()

    @property
    def leading(self) -> bool:
        """Whether it may act now."""
        return self.remaining() > 0

    @property
    def heard(self) -> bool:
        """Whether the API server has answered about the lease lately."""
        return self._clock() - self._heard <= 3 * self._terms.duration

    async def change(self) -> None:
        """Wait until `leading` may have changed."""
        await self._changed.wait()
        self._changed.clear()

    async def run(self) -> None:
        """For ever; ends by cancellation, after which `release` hands the lease over."""
        while True:
            await self.turn()
            await self._sleep(self.pause())

    async def alone(self) -> None:
        """Until no other operator can act. The caller sets a deadline.

        This one leads, or there was no lease for its whole duration, as in a namespace that goes, where
        none can be made.
        """
        await self.turn()
        while not (self.leading or self._clock() - self._absent >= self._terms.duration):
            await self._sleep(self._terms.retry)
            await self.turn()

    async def turn(self) -> None:
        """One look at the lease, and what follows from it."""
        started = self._clock()
        try:
            async with asyncio.timeout(self._terms.renew):
                await self._turn(started)
        except Conflict:
            self._seen = None  # another was quicker: look again
        except (ApiError, TimeoutError) as error:
            _log.warning(
                "lease %s/%s: %s", self._terms.namespace, self._terms.name, str(error) or "no answer"
            )
        self._tell()

    def pause(self) -> float:
        """Until the next turn. A holder that fell behind, and everyone else, look more often."""
        behind = self._until - self._clock() < self._terms.duration - self._terms.renew
        return self._terms.retry if behind else self._terms.renew

    async def release(self) -> None:
        """Give the lease up, so that another need not wait for its end."""
        held, self._until = self._lease, float("-inf")
        self._tell()
        if held is None or held["spec"].get("holderIdentity") != self._terms.identity:
            return
        try:
            async with asyncio.timeout(self._terms.renew):
                await self._api.replace(LEASES, {**held, "spec": {**held["spec"], "holderIdentity": ""}})
        except (ApiError, TimeoutError) as error:
            _log.warning("lease was not released: %s", str(error) or "no answer")

    async def _turn(self, started: float) -> None:
        terms = self._terms
        lease = await self._api.get(LEASES, terms.namespace, terms.name)
        self._heard = self._clock()
        self._absent = min(self._absent, self._heard) if lease is None else float("inf")
        if lease is not None:
            version = lease["metadata"]["resourceVersion"]
            if self._seen is None or self._seen.version != version:
                self._seen = Seen(version, self._clock())
        step = next_step(lease, self._seen, terms, self._clock())
        if step is Step.WAIT:
            self._lease, self._until = None, float("-inf")
            return
        wished = self._record(lease, step)
        call = self._api.create if step is Step.CREATE else self._api.replace
        self._lease = await call(LEASES, wished)
        self._until = started + terms.duration

    def _record(self, lease: Object | None, step: Step) -> Object:
        terms, stamp = self._terms, _timestamp()
        old = dict(lease["spec"]) if lease is not None and lease.get("spec") else {}
        spec = {
            **old,
            "holderIdentity": terms.identity,
            "leaseDurationSeconds": round(terms.duration),
            "renewTime": stamp,
        }
        if step is not Step.RENEW:
            spec["acquireTime"] = stamp
            spec["leaseTransitions"] = int(old.get("leaseTransitions") or 0) + (1 if old else 0)
        metadata = {"name": terms.name, "namespace": terms.namespace}
        base = lease if lease is not None else {"metadata": metadata}
        return {**base, "apiVersion": LEASES.api_version, "kind": LEASES.kind, "spec": spec}

    def _tell(self) -> None:
        if self.leading != self._told:
            self._told = not self._told
            _log.info("%s now acts", self._terms.identity if self._told else "another operator, or none,")
            self._changed.set()


def _timestamp() -> str:
    """MicroTime; read by people only."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
