"""Engines and agents whose answers to the router's own questions have no end, or no bottom."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from aiohttp import web

from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.faults import page

DEEP = b'{"data": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


class Endless(FakeEngine):
    """Answers one path for as long as it is listened to."""

    def __init__(self, path: str, piece: bytes = b" " * 2**20) -> None:
        super().__init__()
        self._path = path
        self._piece = piece
        self.left = asyncio.Event()

    def application(self) -> web.Application:
        app = super().application()
        app.middlewares.append(self._instead)
        return app

    @web.middleware
    async def _instead(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != self._path:
            return await handler(request)
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            with contextlib.suppress(ConnectionError):
                while True:
                    await answer.write(self._piece)
        finally:
            self.left.set()
        return answer


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
async def test_an_engines_endless_answer_is_left_and_others_serve(router, http, path) -> None:
    async with Endless(path) as odd, FakeEngine() as well:
        replicas = [{"url": odd.url, "name": "odd"}, {"url": well.url, "name": "well"}]
        running = await router(ready=False, replicas=replicas)
        await asyncio.wait_for(odd.left.wait(), 60)
        while await page(http, running.url, "/readyz") != 200:
            pass
        found = running.mind.replicas["odd"]
        if path != "/metrics":  # tells nothing of the engine's health
            assert "longer than" in found.problem
            assert not found.healthy


async def test_a_list_of_models_without_bottom_is_said(router, http, until) -> None:
    class Deep(FakeEngine):
        async def _models(self, request: web.Request) -> web.Response:
            return web.Response(body=DEEP)

    async with Deep() as odd:
        running = await router(ready=False, replicas=[{"url": odd.url, "name": "odd"}])
        await until(lambda: "not a model list" in running.mind.replicas["odd"].problem)
