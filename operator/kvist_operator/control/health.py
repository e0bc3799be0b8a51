"""`/healthz`, `/readyz`, `/metrics` of the operator. Called by app.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvist_connector import names
from kvist_operator.listen import listening_on


@asynccontextmanager
async def serving(
    host: str, port: int, registry: CollectorRegistry, problem: Callable[[], str], ready: Callable[[], str]
) -> AsyncIterator[int]:
    """The port it listens on. `problem` and `ready`: why the process is not well, not ready; else ''."""
    app = web.Application()

    async def answer(text: str) -> web.Response:
        body = {"status": text or "ok"}
        return web.json_response(body, status=503 if text else 200)

    async def healthz(_: web.Request) -> web.Response:
        return await answer(problem())

    async def readyz(_: web.Request) -> web.Response:
        return await answer(ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.add_routes(
        [
            web.get(names.PATH_HEALTHZ, healthz),
            web.get(names.PATH_READYZ, readyz),
            web.get(names.PATH_METRICS, metrics),
        ]
    )
    async with listening_on(app, host, port, "port", "choose another with --port") as found:
        yield found
