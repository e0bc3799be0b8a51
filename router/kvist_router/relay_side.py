"""Composition of a relay: what clients talk to. It holds no index and asks a mind, wherever that is.

Called by app.py when all is one process, by processes/child.py in each relay's own.
"""

from __future__ import annotations

import asyncio
import importlib
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp

from kvist_connector.errors import ConfigError
from kvist_router.access.door import Door
from kvist_router.access.keys import KeyBook
from kvist_router.endpoint import Endpoint, rest_app
from kvist_router.exposition import Exposition
from kvist_router.logs import RequestLog, reconfigure
from kvist_router.metrics import RelayMetrics
from kvist_router.mind.interface import Mind, Outlook
from kvist_router.mind.supervise import Counted, background
from kvist_router.relay.app import Relay
from kvist_router.relay.upstream import Upstream
from kvist_router.settings import RouterSettings
from kvist_router.tls import ServerTls, TlsSettings


@dataclass(frozen=True, slots=True)
class RelaySide:
    """A relay that can be served."""

    app: ASGIApp
    tls: ssl.SSLContext | None
    book: KeyBook
    relay: Relay
    log: RequestLog

    async def use(self, settings: RouterSettings) -> None:
        """Other settings while it runs. Keys first: their files may be wrong, and then nothing has changed.

        Raises ConfigError.
        """
        await asyncio.to_thread(self.book.use, settings.auth, settings.tenants)
        self.relay.use(settings.limits, settings.admission.longest_wait)
        self.log.settings = settings.log
        reconfigure(settings.log_level, settings.log)


@asynccontextmanager
async def relay_side(
    settings: RouterSettings,
    mind: Mind,
    outlook: Outlook,
    metrics: RelayMetrics,
    failures: Counted,
    exposition: Exposition,
    reader: str,
) -> AsyncIterator[RelaySide]:
    """Everything wired; raises ConfigError. `reader`: this router's name, for traces."""
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream(settings.limits))
        book = await stack.enter_async_context(_book(settings, failures))
        tls = await stack.enter_async_context(server_tls(settings.tls, failures))
        relay = Relay(mind, upstream, settings.limits, metrics, settings.admission.longest_wait)
        door = Door(book, settings.tenant.header)
        app = Endpoint(relay, rest_app(outlook, exposition), door, metrics)
        traced = await stack.enter_async_context(_traced(app, settings, reader))
        log = RequestLog(traced, settings.log)
        yield RelaySide(log, tls, book, relay, log)


@asynccontextmanager
async def _book(settings: RouterSettings, failures: Counted) -> AsyncIterator[KeyBook]:
    """API keys, read again when their files change."""
    separated = settings.tenant.secret_file is not None
    book = await asyncio.to_thread(KeyBook, settings.auth, settings.tenants, separated)
    async with background("keys", book.watch, failures):
        yield book


@asynccontextmanager
async def _traced(app: ASGIApp, settings: RouterSettings, reader: str) -> AsyncIterator[ASGIApp]:
    """The app with a span around each request, where traces are wanted."""
    wanted = settings.tracing
    if wanted.endpoint is None:
        yield app
        return
    try:
        found = importlib.import_module("kvist_router.tracing")
    except ImportError as error:
        raise ConfigError(f"tracing.endpoint: {error.name} is missing: install kvist[tracing]") from error
    async with found.tracing(wanted.endpoint, wanted.ratio, reader) as tracer:
        yield found.Traced(app, tracer)


@asynccontextmanager
async def server_tls(settings: TlsSettings, failures: Counted) -> AsyncIterator[ssl.SSLContext | None]:
    """Certificates, read again when their files change."""
    if settings.certificate_file is None:
        yield None
        return
    tls = await asyncio.to_thread(ServerTls, settings, settings.certificate_file)
    async with background("certificates", tls.watch, failures):
        yield tls.context
