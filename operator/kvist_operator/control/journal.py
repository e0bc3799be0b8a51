"""Kubernetes events on CacheClusters: what `kubectl describe cc` tells. Called by reconcile.py.

The same event of the same object is one Event whose count grows, written at most once in `quiet` seconds, so
an operator that repeats itself does not fill etcd. Its name is derived, so another operator continues it.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvist_operator.control.api import Api
from kvist_operator.control.errors import ApiError, Conflict
from kvist_operator.control.resources import CLUSTERS, EVENTS, Object
from kvist_operator.render.kube.meta import MANAGER

QUIET_SECONDS: Final = 600.0
MEMORY: Final = 4096
_log = logging.getLogger(__name__)


@dataclass
class _Told:
    at: float
    count: int


class Journal:
    """Writes events; a failure is logged and harms nothing else."""

    def __init__(
        self,
        api: Api,
        clock: Callable[[], float],
        now: Callable[[], datetime.datetime],
        quiet: float = QUIET_SECONDS,
    ) -> None:
        self._api = api
        self._clock = clock
        self._now = now
        self._quiet = quiet
        self._told: OrderedDict[str, _Told] = OrderedDict()

    async def tell(self, cluster: Object, reason: str, message: str, *, warning: bool = False) -> None:
        """One event on a CacheCluster."""
        name = _name(cluster, reason, message)
        known = self._told.get(name)
        if known is not None and self._clock() - known.at < self._quiet:
            known.count += 1
            return
        told = _Told(self._clock(), known.count + 1 if known is not None else 1)
        self._told[name] = told
        self._told.move_to_end(name)
        while len(self._told) > MEMORY:
            self._told.popitem(last=False)
        _log.log(logging.WARNING if warning else logging.INFO, "%s: %s: %s", _path(cluster), reason, message)
        try:
            await self._write(cluster, name, reason, message, "Warning" if warning else "Normal", told.count)
        except ApiError as error:
            _log.warning("%s: event %s was not written: %s", _path(cluster), reason, error)

    async def _write(
        self, cluster: Object, name: str, reason: str, message: str, kind: str, count: int
    ) -> None:
        meta, stamp = cluster["metadata"], self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": CLUSTERS.api_version,
                "kind": CLUSTERS.kind,
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "reason": reason,
            "message": message[:1024],
            "type": kind,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": count,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": MANAGER,
        }
        try:
            await self._api.create(EVENTS, event)
        except Conflict:  # told before, perhaps by another operator
            patch = {"lastTimestamp": stamp, "count": max(2, count)}
            await self._api.patch(EVENTS, meta["namespace"], name, patch)


def _name(cluster: Object, reason: str, message: str) -> str:
    meta = cluster["metadata"]
    text = "\0".join((meta["uid"], reason, message))
    return f"{meta['name']}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _path(cluster: Object) -> str:
    return f"{cluster['metadata']['namespace']}/{cluster['metadata']['name']}"
