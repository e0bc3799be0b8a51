"""Asks routers and agents of settled clusters from time to time, without the API server. Called by app.py.

A router that loses or finds an engine changes no Kubernetes object; this notices it, and that figures moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvist_operator.control.api import Key
from kvist_operator.control.ask import Programs
from kvist_operator.control.gather import ask_router, ask_tiers
from kvist_operator.control.pods import Pod
from kvist_operator.control.reconcile import Memory
from kvist_operator.control.snapshot import Snapshot
from kvist_operator.control.status import FIGURES_SECONDS, hits
from kvist_operator.control.views import Figures, RouterView, total
from kvist_operator.render.kube.meta import ROUTER

AT_ONCE = 16


class RouterPoll:
    """`clusters` is the reconciler's memory; a cluster whose routers say something new is `add`ed."""

    def __init__(
        self,
        programs: Programs,
        clusters: Mapping[Key, Memory],
        add: Callable[[Key], object],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._programs = programs
        self._clusters = clusters
        self._add = add
        self._limit = asyncio.Semaphore(AT_ONCE)

    async def turn(self) -> None:
        """Ask all of them once."""
        known = [(key, memory) for key, memory in self._clusters.items() if memory.snapshot is not None]
        await asyncio.gather(*(self._look(key, memory) for key, memory in known))

    async def _look(self, key: Key, memory: Memory) -> None:
        snapshot = memory.snapshot
        if snapshot is None:
            return
        pods = [pod for pod in snapshot.of(ROUTER) if pod.name in snapshot.views]
        views = {pod.name: await self._ask(pod) for pod in pods}
        tiers = await ask_tiers(self._programs, snapshot.cluster, snapshot.pods, snapshot.token)
        due = self._clock() - memory.written_at >= FIGURES_SECONDS
        seen = sees_otherwise(snapshot, views) or tiers != snapshot.tiers
        if seen or (due and counts_otherwise(snapshot, views)):
            self._add(key)

    async def _ask(self, pod: Pod) -> RouterView:
        async with self._limit:
            return await ask_router(self._programs, pod)


def sees_otherwise(snapshot: Snapshot, views: Mapping[str, RouterView]) -> bool:
    """Whether these views differ from the snapshot's in more than counters. Pure."""
    return _bare(snapshot.views) != _bare(views)


def counts_otherwise(snapshot: Snapshot, views: Mapping[str, RouterView]) -> bool:
    """Whether the rounded figures differ. Pure."""
    return hits(total(snapshot.views.values())) != hits(total(views.values()))


def _bare(views: Mapping[str, RouterView]) -> dict[str, RouterView]:
    return {name: replace(view, figures=Figures()) for name, view in views.items()}
