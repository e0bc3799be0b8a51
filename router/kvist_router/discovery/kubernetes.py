"""Replicas from the EndpointSlices of a headless Service. Called by app.py.

List, then watch from the list's version; bookmarks move the version on, a version that is gone, and
anyway every few minutes, brings a new list: a watch that silently lost something must not send requests
to dead pods for ever. Failures are said in `problem`, and tried again after growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from kvist_router.discovery.endpoint_slices import Slice, SliceList, Slices
from kvist_router.discovery.kubernetes_api import KubernetesApi
from kvist_router.discovery.source import Listed
from kvist_router.errors import DiscoveryError, Expired
from kvist_router.pauses import Pauses

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds."""

    watch: float = 60.0  # a watch is asked anew after this long: a dead connection is noticed
    relist: float = 300.0
    first_pause: float = 0.2
    longest_pause: float = 10.0


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class KubernetesSource:
    """See source.Source."""

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        service: str,
        random: Random,
        pace: Pace = Pace(),
        agent_scheme: str = "http",
    ) -> None:
        self._agent_scheme = agent_scheme
        self._api = api
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._where = f"Service {service} in namespace {namespace}"
        self._pace = pace
        self._pauses = Pauses(pace.first_pause, pace.longest_pause, random)
        self.problem = f"{self._where}: not listed yet"

    async def watch(self) -> AsyncIterator[tuple[Listed, ...]]:
        """See source.Source."""
        while True:
            try:
                slices = await self._list()
                yield self._listed(slices)
                until = time.monotonic() + self._pace.relist
                while time.monotonic() < until:
                    async for changed in self._events(slices):
                        if changed:
                            yield self._listed(slices)
            except Expired:
                _log.info("%s: watched for too long without news, listing again", self._where)
            except DiscoveryError as error:
                self._say(f"{self._where}: {error}")
            except msgspec.MsgspecError as error:
                self._say(f"{self._where}: the API server's answer is not understood: {error}")
            await asyncio.sleep(self._pauses.next())

    async def _list(self) -> Slices:
        found = msgspec.json.decode(await self._api.get(self._path, self._selector), type=SliceList)
        return Slices(found, self._agent_scheme)

    async def _events(self, slices: Slices) -> AsyncIterator[bool]:
        """Apply the events of one watch; true for those that change replicas."""
        began = time.monotonic()
        parameters = {
            **self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": slices.version,
            "timeoutSeconds": str(max(1, round(self._pace.watch))),
        }
        lively = False
        async for line in self._api.lines(self._path, parameters, self._pace.watch):
            event = msgspec.json.decode(line, type=_Event)
            if event.type == "ERROR":
                raise _error(msgspec.json.decode(event.object, type=_Status))
            lively = True
            self._pauses.anew()
            yield _apply(event, slices)
        # A server that ends watches at once must not be asked in a tight loop.
        if not lively and time.monotonic() - began < self._pace.first_pause:
            raise DiscoveryError("the watch ended at once")
        self._pauses.anew()

    def _listed(self, slices: Slices) -> tuple[Listed, ...]:
        listed = slices.listed()
        if slices.problem:
            self._say(f"{self._where}: {slices.problem}")
        else:
            self.problem = "" if listed else f"{self._where}: no endpoint"
        return listed

    def _say(self, problem: str) -> None:
        if problem != self.problem:  # once per cause
            _log.warning("%s; the last list stays in force", problem)
        self.problem = problem


def _apply(event: _Event, slices: Slices) -> bool:
    item: Any = msgspec.json.decode(event.object, type=Slice)
    if event.type == "BOOKMARK":
        slices.version = item.metadata.resource_version
        return False
    if event.type == "DELETED":
        slices.drop(item)
    else:
        slices.put(item)
    return True


def _error(status: _Status) -> DiscoveryError:
    if status.code == 410:
        return Expired(status.message)
    return DiscoveryError(f"the watch ended with {status.code}: {status.message}")
