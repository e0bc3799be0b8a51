"""Engines, agents and API servers whose answers to the router's own questions have no end, or no bottom."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import Any

import pytest
from aiohttp import web

from kvist_connector import names
from kvist_connector.settings import validate
from kvist_router.controls.fanout import FanOut
from kvist_router.discovery.kubernetes import KubernetesSource
from kvist_router.discovery.kubernetes_api import Access, Deadlines, KubernetesApi
from kvist_router.mind.agent_link import AgentLink
from kvist_router.mind.replica import Replica
from kvist_router.settings import IndexSettings, ReplicaSettings
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.faults import ASKED, CHAT, page
from kvist_router.testing.server import LocalServer

DEEP = b'{"data": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


class Endless(FakeEngine):
    """Answers one path for as long as it is listened to.

    `slow`: with one piece, and then nothing. `huge`: it says beforehand how long its answer will be.
    """

    def __init__(self, path: str, piece: bytes = b" " * 2**20, kind: str = "endless") -> None:
        super().__init__()
        self._path = path
        self._piece = piece
        self._kind = kind
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
        if self._kind == "huge":
            answer.content_length = 2**40
        await answer.prepare(request)
        try:
            with contextlib.suppress(ConnectionError):
                await answer.write(self._piece)
                if self._kind != "endless":
                    await asyncio.Event().wait()  # until nobody listens any more
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


class Answering(LocalServer):
    """An agent whose lookups find 7 chunks; `padding` makes the answer longer."""

    def __init__(self, padding: bytes = b"") -> None:
        super().__init__()
        self._body = b'{"chunks": 7}' + padding

    def application(self) -> web.Application:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(body=self._body)

        app = web.Application()
        app.router.add_post(names.PATH_LOOKUP, answer)
        return app


def replica(name: str, server: LocalServer) -> Replica:
    given = {"name": name, "url": server.url, "agent": server.url}
    return Replica(validate(ReplicaSettings, given), IndexSettings())


@pytest.mark.parametrize(
    ("kind", "words"), [("endless", "is longer than"), ("huge", "is longer than"), ("slow", "in time")]
)
async def test_a_control_leaves_agents_whose_answers_do_not_end(http, kind, words) -> None:
    async with Endless(names.PATH_LOOKUP, b" " * 2**16, kind) as odd, Answering() as well:
        many = [replica(f"odd-{number}", odd) for number in range(70)]  # more than are asked at a time
        most = 2 * 2**16 * len(many)
        fanout = FanOut(http, AgentLink("test"), 60, most)
        hasty = FanOut(http, AgentLink("test"), 0.05, most) if kind == "slow" else fanout
        for answer in (await hasty.ask(many, names.PATH_LOOKUP, {})).values():
            assert words in answer["error"]
        await asyncio.wait_for(odd.left.wait(), 60)
        assert await fanout.ask([replica("well", well)], names.PATH_LOOKUP, {}) == {"well": {"chunks": 7}}


async def test_answers_to_one_question_are_bounded_together(http) -> None:
    async with Answering(b" " * 4000) as agent:
        fanout = FanOut(http, AgentLink("test"), 60, most=10_000)
        replicas = [replica(f"r-{number}", agent) for number in range(3)]
        for answer in (await fanout.ask(replicas[:2], names.PATH_LOOKUP, {})).values():
            assert answer == {"chunks": 7}
        for answer in (await fanout.ask(replicas, names.PATH_LOOKUP, {})).values():
            assert "ask fewer replicas at a time" in answer["error"]


@pytest.mark.parametrize("kind", ["endless", "huge", "slow"])
async def test_an_engines_endless_tokens_cost_a_request_nothing_but_its_keys(
    router, http, at_rest, kind
) -> None:
    seconds = 0.05 if kind == "slow" else 60
    async with Endless("/tokenize", kind=kind) as engine:
        running = await router(replicas=[{"url": engine.url}], tokens={"remote_seconds": seconds})
        async with http.post(running.url + CHAT, json={**ASKED, "stream": False}) as answer:
            assert answer.status == 200
            assert await answer.read()
        await asyncio.wait_for(engine.left.wait(), 60)
        assert len(engine.received) == 1
        await at_rest(running)


@pytest.mark.parametrize("watching", [False, True])
async def test_an_api_servers_endless_answer_is_left_and_said(http, watching, until) -> None:
    listed = b'{"metadata": {"resourceVersion": "1"}, "items": []}'

    class Server(LocalServer):
        def application(self) -> web.Application:
            async def answer(request: web.Request) -> web.StreamResponse:
                if watching and "watch" not in request.query:
                    return web.Response(body=listed)
                endless = web.StreamResponse()
                await endless.prepare(request)
                with contextlib.suppress(ConnectionError):
                    while True:
                        await endless.write(b" " * 2**20)
                return endless

            app = web.Application()
            app.router.add_get("/{path:.*}", answer)
            return app

    async def follow(source: KubernetesSource) -> None:
        async for _ in source.watch():
            pass

    async with Server() as server:
        api = KubernetesApi(http, Access(server.url, None, None), Deadlines(request=60))
        source = KubernetesSource(api, "here", "pool", Random(1))
        following = asyncio.create_task(follow(source))
        await until(lambda: f"the {'line' if watching else 'answer'} is longer than" in source.problem)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
