"""Carries decisions about pods out: readiness gates, drains, evictions. Called by reconcile.py."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from kvist_connector.quantity import counted
from kvist_operator.control import reasons
from kvist_operator.control.api import Api
from kvist_operator.control.ask import Programs
from kvist_operator.control.errors import NoAnswer, NotFound, TooMany
from kvist_operator.control.gather import DRAINING
from kvist_operator.control.journal import Journal
from kvist_operator.control.pods import Pod
from kvist_operator.control.resources import PODS, Object
from kvist_operator.control.rollout import Action, Decision
from kvist_operator.control.snapshot import Snapshot
from kvist_operator.control.views import RouterView
from kvist_operator.render.kube.meta import READINESS_GATE, ROUTER

_UNSEEN: Final = RouterView("not asked")


def opened(pods: Collection[Pod], views: Mapping[str, RouterView]) -> tuple[Pod, ...]:
    """Pods whose readiness gate is to be opened: a ready router mirrors them. Pure.

    A router is ready only once it knows a healthy engine, which the first of a cluster may be long before its
    pod is ready; while no router is ready, the word of one that answers is enough.
    """
    routers = [pod for pod in pods if pod.component == ROUTER and not pod.terminating]
    asked = [pod for pod in routers if pod.ready] or routers
    words = [views.get(pod.name, _UNSEEN) for pod in asked]
    return tuple(
        pod
        for pod in pods
        if pod.gate is False and pod.serving and not pod.terminating
        if any(view.mirrors(pod.name) for view in words)
    )


class Acts:
    """One step at a time; the next reconciliation sees what came of it."""

    def __init__(self, api: Api, programs: Programs, journal: Journal) -> None:
        self._api = api
        self._programs = programs
        self._journal = journal

    async def open_gates(self, namespace: str, pods: Iterable[Pod], now: datetime.datetime) -> None:
        """Once per pod: an open gate is never shut."""
        for pod in pods:
            await self._condition(
                namespace, pod, READINESS_GATE, "Mirrored", "a router mirrors this engine", now
            )

    async def carry_out(self, snapshot: Snapshot, decision: Decision, token: str) -> None:
        """The pod's part of a decision; replicas are part of what is rendered."""
        raw, pod = snapshot.raw, decision.pod
        if decision.action is Action.SCALE and snapshot.engines.replicas not in (None, decision.replicas):
            message = f"{snapshot.engines.replicas} to {counted(decision.replicas, 'engine')}"
            await self._journal.tell(raw, reasons.SCALED, message)
        if pod is None:
            return
        if decision.action is Action.DRAIN:
            await self._condition(
                snapshot.namespace, pod, DRAINING, "ScaleDown", decision.message, snapshot.now
            )
            await self._journal.tell(raw, reasons.DRAIN_STARTED, decision.message)
            await self._ask(pod, token, undo=False)
        elif decision.action is Action.UNDRAIN:
            await self._ask(pod, token, undo=True)
            await self._condition(
                snapshot.namespace, pod, DRAINING, "Wanted", decision.message, snapshot.now, on=False
            )
            await self._journal.tell(raw, reasons.DRAIN_UNDONE, decision.message)
        elif decision.action is Action.EVICT:
            await self._evict(raw, pod, decision.message)

    async def _evict(self, raw: Object, pod: Pod, message: str) -> None:
        namespace = raw["metadata"]["namespace"]
        try:
            gone = await self._api.evict(
                {"metadata": {"name": pod.name, "namespace": namespace, "uid": pod.uid}}
            )
        except TooMany as error:
            await self._journal.tell(
                raw,
                reasons.EVICTION_REFUSED,
                reasons.told(reasons.EVICTION_REFUSED, f"{pod.name} stays for now: {error}"),
                warning=True,
            )
            return
        if gone:
            await self._journal.tell(raw, reasons.EVICTED, message)

    async def _ask(self, pod: Pod, token: str, *, undo: bool) -> None:
        try:
            await self._programs.drain(pod, token, undo=undo)
        except NoAnswer:
            return  # gather.py asks again, until the drain's deadline

    async def _condition(
        self,
        namespace: str,
        pod: Pod,
        kind: str,
        reason: str,
        message: str,
        now: datetime.datetime,
        *,
        on: bool = True,
    ) -> None:
        condition = {
            "type": kind,
            "status": str(on),
            "reason": reason,
            "message": message,
            "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        patch = {"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}}
        try:
            await self._api.patch(PODS, namespace, pod.name, patch, subresource="status")
        except NotFound:
            return  # its successor gets its own
