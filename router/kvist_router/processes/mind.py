"""The mind's process: admin port, and the socket at which relays ask. Called by child.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvist_router.logs import reconfigure
from kvist_router.mind.socket import MindServer
from kvist_router.mind_side import mind_side
from kvist_router.processes.sides import Inherited, Side
from kvist_router.relay_side import server_tls
from kvist_router.server import Served, Servers
from kvist_router.settings import RouterSettings
from kvist_router.tls import TlsSettings


@asynccontextmanager
async def build(settings: RouterSettings, inherited: Inherited) -> AsyncIterator[Side]:
    """A mind that answers; raises ConfigError."""
    sockets = inherited.sockets
    assert sockets.relays is not None  # see keeper.py
    admin_tls = settings.tls if settings.tls.admin else TlsSettings()
    async with (
        mind_side(settings, inherited.registry, inherited.exposition) as side,
        server_tls(admin_tls, side.mind.metrics) as tls,
    ):
        server = MindServer(side.mind, side.outlook.view)
        await server.start(sockets.relays)

        async def use(changed: RouterSettings) -> None:
            side.mind.use(changed)
            reconfigure(changed.log_level, changed.log)

        try:
            yield Side(Servers([Served(side.admin, sockets.listener, tls)], settings.limits), use)
        finally:
            await server.close()
