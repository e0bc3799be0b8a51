"""A stand-in for an engine: OpenAI paths with answers that a test steers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from kvist_router.testing.server import LocalServer

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Received:
    """One request that came in."""

    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False


class FakeEngine(LocalServer):
    """Answers `pieces` as a stream, or their text as one body.

    `answer` replaces the whole answer. `first_byte` and `rest` are gates: cleared, they hold the
    answer before its first piece, or after it. `tokens` answers /tokenize. `stored` are the ids of responses
    that it keeps, `probed` those it was asked for, `metrics` is its page of metrics.
    """

    def __init__(self, model: str = "m", longest: int = 8192, port: int = 0) -> None:
        super().__init__(port)
        self.model, self.longest = model, longest
        self.pieces = [f'data: {{"n": {number}}}\n\n'.encode() for number in range(3)] + [b"data: [DONE]\n\n"]
        self.received: list[Received] = []
        self.arrived = asyncio.Condition()
        self.first_byte, self.rest = asyncio.Event(), asyncio.Event()
        self.first_byte.set()
        self.rest.set()
        self.answer: Answer | None = None
        self.tokens: Callable[[dict[str, object]], list[int]] | None = None
        self.tokenized = 0
        self.tokenizing = asyncio.Event()
        self.tokenizing.set()
        self.health_status = 200
        self.metrics = ""
        self.stored: set[str] = set()
        self.probed: list[str] = []

    def application(self) -> web.Application:
        """See LocalServer."""
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._generate)
        for path in ("/v1/completions", "/v1/responses", "/v1/embeddings", "/detokenize"):
            app.router.add_post(path, self._generate)
        app.router.add_get("/v1/responses/{id}", self._stored)
        app.router.add_post("/v1/responses/{id}/cancel", self._stored)
        return app

    async def wait_received(self, count: int, seconds: float = 60.0) -> Received:
        """The request number `count`, once it is here."""
        async with asyncio.timeout(seconds), self.arrived:
            await self.arrived.wait_for(lambda: len(self.received) >= count)
        return self.received[count - 1]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "max_model_len": self.longest, "parent": None}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _stored(self, request: web.Request) -> web.Response:
        self.probed.append(request.match_info["id"])
        if request.match_info["id"] not in self.stored:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        return web.json_response({"id": request.match_info["id"], "path": request.path})

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.tokenized += 1
        await self.tokenizing.wait()
        if self.tokens is None:
            return web.Response(status=404)
        tokens = self.tokens(await request.json())
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.longest})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        received = Received(request.path, request.rel_url.raw_query_string, headers, body)
        async with self.arrived:
            self.received.append(received)
            self.arrived.notify_all()
        try:
            return await (self.answer or self._default)(request)
        except (asyncio.CancelledError, ConnectionError):
            received.cancelled = True
            raise
        finally:
            received.ended.set()

    async def _default(self, request: web.Request) -> web.StreamResponse:
        if not json.loads(await request.read()).get("stream"):
            await self.first_byte.wait()
            return web.Response(
                body=b'{"choices": [{"message": {"content": "ok"}}]}',
                headers={"content-type": "application/json", "x-engine": "yes"},
            )
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await self.first_byte.wait()
        for number, piece in enumerate(self.pieces):
            if number == 1:
                await self.rest.wait()
            await response.write(piece)
        return response
