"""The port where other routers read this one's dispatches. Called by circle.py."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable
from typing import Final

from aiohttp import web

from kvist_connector import names
from kvist_router.errors import FeedError
from kvist_router.mind.agent_link import AgentLink
from kvist_router.mind.neighbours.messages import CONTENT_TYPE
from kvist_router.mind.neighbours.publisher import Listener, Publisher
from kvist_router.mind.neighbours.settings import MAX_NEIGHBOURS

BEAT_SECONDS: Final = 1.0


class DispatchServer:
    """`link` has the token that readers must have, none: no token."""

    def __init__(self, publisher: Publisher, link: AgentLink, now: Callable[[], float]) -> None:
        self._publisher, self._link, self._now = publisher, link, now
        self._readers = 0

    @property
    def open(self) -> bool:
        """Whether anyone may read."""
        return self._link.token_file is None

    def application(self) -> web.Application:
        """One path."""
        app = web.Application(client_max_size=1024)
        app.router.add_get(names.PATH_DISPATCHES, self._dispatches)
        return app

    async def _dispatches(self, request: web.Request) -> web.StreamResponse:
        problem = await self._problem(request)
        if problem is not None:
            return problem
        response = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        await response.prepare(request)
        listener = self._publisher.listen(self._now())
        self._readers += 1
        try:
            await self._stream(response, listener)
        finally:
            self._readers -= 1
            self._publisher.leave(listener)
        return response

    async def _problem(self, request: web.Request) -> web.Response | None:
        if self._link.serving is not None and not request.get_extra_info("ssl_object").getpeercert():
            return web.json_response({"error": {"message": "a client certificate is needed"}}, status=401)
        try:
            expected = (await self._link.headers()).get("Authorization", "")
        except FeedError as error:
            return web.json_response({"error": {"message": str(error)}}, status=503)
        if not hmac.compare_digest(_given(request), expected.encode()):
            return web.json_response({"error": {"message": "missing or wrong bearer token"}}, status=401)
        if self._readers >= 2 * MAX_NEIGHBOURS:
            return web.json_response({"error": {"message": "too many readers"}}, status=503)
        return None

    async def _stream(self, response: web.StreamResponse, listener: Listener) -> None:
        """Until the reader leaves or is too slow."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while frames := await listener.take(BEAT_SECONDS):
                async with asyncio.timeout(10 * BEAT_SECONDS):
                    await response.write(frames)


def _given(request: web.Request) -> bytes:
    # Header bytes that are no UTF-8 come as lone surrogates; they are part of no token.
    return request.headers.get("Authorization", "").encode(errors="surrogateescape")
