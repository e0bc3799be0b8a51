"""A relay's process. Called by child.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvist_router.access.salt import read_secret
from kvist_router.metrics import RelayMetrics, TaskMetrics
from kvist_router.mind.fallback import HashMind
from kvist_router.mind.remote import RemoteMind
from kvist_router.mind.supervise import background
from kvist_router.processes.sides import Inherited, Side
from kvist_router.relay_side import relay_side
from kvist_router.server import Served, Servers
from kvist_router.settings import RouterSettings


@asynccontextmanager
async def build(settings: RouterSettings, inherited: Inherited) -> AsyncIterator[Side]:
    """A relay that can be served; raises ConfigError."""
    registry, exposition = inherited.registry, inherited.exposition
    metrics, tasks = RelayMetrics(registry), TaskMetrics(registry)
    limits = settings.limits
    fallback = HashMind(read_secret(settings.tenant.secret_file), limits.in_flight)
    fallback.view = inherited.view
    mind = RemoteMind(
        inherited.mind,
        fallback,
        metrics,
        metrics.keep,
        settings.index.ready_seconds,
        limits.silent_mind_seconds,
    )
    async with (
        background("mind", mind.follow, tasks),
        relay_side(settings, mind, mind, metrics, tasks, exposition, settings.reader) as side,
    ):
        served = Served(side.app, inherited.sockets.listener, side.tls, shared=True)
        yield Side(Servers([served], limits, on_stop=mind.stop), side.use, lambda: fallback.view)
