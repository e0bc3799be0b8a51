"""Wires a mind to the other routers. Called by app.py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from os import urandom
from random import Random
from typing import Final

import aiohttp
from aiohttp import web

from kvist_connector.errors import ConfigError
from kvist_connector.tls import LiveContext
from kvist_router.mind.agent_link import AgentLink
from kvist_router.mind.mind import LocalMind
from kvist_router.mind.neighbours.circle import Circle
from kvist_router.mind.neighbours.publisher import Publisher
from kvist_router.mind.neighbours.reader import DispatchReader
from kvist_router.mind.neighbours.server import DispatchServer
from kvist_router.mind.neighbours.settings import NeighbourSettings
from kvist_router.mind.supervise import background

CLOSE_SECONDS: Final = 1.0
IDLE_SECONDS: Final = 75.0
LOOK_SECONDS: Final = 1.0
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_log = logging.getLogger(__name__)


@asynccontextmanager
async def neighbours(
    settings: NeighbourSettings, mind: LocalMind, session: aiohttp.ClientSession, link: AgentLink
) -> AsyncIterator[Circle]:
    """Tell what the mind sends and hear what others send, while the context lasts. Raises ConfigError."""
    instance = urandom(16)
    publisher = Publisher(link.reader, instance, mind.in_flight)
    reader = DispatchReader(
        session, link, settings.silent_seconds, instance, mind.replicas, time.monotonic, Random()
    )
    circle = Circle(settings, reader, mind.metrics)
    async with AsyncExitStack() as stack:
        if settings.port is not None:
            await stack.enter_async_context(
                _serving(settings, DispatchServer(publisher, link, time.monotonic), link.serving)
            )
            if link.serving is not None:
                follow = partial(_followed, link.serving)
                await stack.enter_async_context(background("certificates", follow, mind.metrics))
            mind.in_flight.watcher = publisher
        if settings.urls:
            stack.push_async_callback(circle.close)
            await stack.enter_async_context(background("neighbours", circle.follow, mind.metrics))
            mind.unheard, mind.neighbours = lambda: circle.unheard, circle.describe
        yield circle


async def _followed(tls: LiveContext) -> None:
    """A listener's context is made once: new files are looked for."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await asyncio.to_thread(tls)


@asynccontextmanager
async def _serving(
    settings: NeighbourSettings, server: DispatchServer, tls: LiveContext | None
) -> AsyncIterator[None]:
    if server.open and settings.host not in LOOPBACK:
        raise ConfigError(
            f"neighbours.host: {settings.host} can be reached from other machines: "
            "give agent.token_file, or a loopback address"
        )
    # Connections that ask for nothing are closed, or strangers could take all file descriptors.
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        shutdown_timeout=CLOSE_SECONDS,
        keepalive_timeout=IDLE_SECONDS,
    )
    await runner.setup()
    try:
        try:
            context = None if tls is None else tls()
            await web.TCPSite(runner, settings.host, settings.port, ssl_context=context).start()
        except OSError as error:
            raise ConfigError(
                f"neighbours.port: {settings.host}:{settings.port} cannot be listened on: {error.strerror}"
            ) from error
        _log.info("other routers read dispatches at %s", runner.addresses[0])
        yield
    finally:
        await runner.cleanup()
