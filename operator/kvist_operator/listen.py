"""An aiohttp application on a port while a context lasts. For control/health.py and webhook/server.py."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from kvist_connector.errors import ConfigError

IDLE_SECONDS = 75.0


@asynccontextmanager
async def listening_on(
    app: web.Application, host: str, port: int, setting: str, remedy: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """The port it listens on; raises ConfigError, naming the setting of the port, when it cannot."""
    # Nothing is unpacked here: clients of the operator's ports pack nothing, and are not known yet.
    # A connection that asks for nothing is closed, or strangers could take all file descriptors.
    runner = web.AppRunner(app, access_log=None, auto_decompress=False, keepalive_timeout=IDLE_SECONDS)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
        except OSError as error:
            raise ConfigError(
                f"{setting}: cannot listen on {host}:{port} ({error.strerror}); {remedy}"
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
