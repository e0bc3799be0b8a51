"""`POST /validate` over TLS. Started by run.py.

The certificate is replaced while connections go on: new ones get the new one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from kvist_operator.listen import listening_on
from kvist_operator.render.kube import Context
from kvist_operator.webhook.judge import ReviewError, review

_log = logging.getLogger(__name__)
PATH_VALIDATE: Final = "/validate"
# An object is at most 1.5 MiB in etcd, and an update holds two.
MOST_BYTES: Final = 4 * 1024**2
READ_SECONDS: Final = 4.0  # the API server waits for 5


class Tls:
    """A server's TLS context whose certificate can be replaced; without one handshakes fail."""

    def __init__(self) -> None:
        self.context = _context()

    def load(self, chain: bytes, key: bytes) -> None:
        """Both in PEM form. ValueError when they do not belong together: then the old one stays."""
        with tempfile.TemporaryDirectory(prefix="kvist-webhook-") as folder:
            path = Path(folder) / "chain.pem"
            path.touch(mode=0o600)
            path.write_bytes(chain + key)
            try:
                _context().load_cert_chain(path)
                self.context.load_cert_chain(path)
            except ssl.SSLError as error:
                raise ValueError(f"certificate and key cannot be served: {error.reason}") from error


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@asynccontextmanager
async def listening(host: str, port: int, context: Context, tls: Tls) -> AsyncIterator[int]:
    """The port it listens on; raises ConfigError when it cannot."""
    app = web.Application(client_max_size=MOST_BYTES)

    async def validate(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(READ_SECONDS):
                body: Any = json.loads(await request.read())
            return web.json_response(review(body, context))
        except TimeoutError:
            return web.Response(status=408, text=f"no whole body within {READ_SECONDS:g} s")
        except (ReviewError, ValueError, RecursionError) as error:
            return web.Response(status=400, text=str(error)[:1024])

    app.add_routes([web.post(PATH_VALIDATE, validate)])
    async with listening_on(app, host, port, "webhook.port", "choose another", tls.context) as found:
        yield found
