"""What the admin port says while the mind is not there: 503 at once, and the metrics of those that are.

Called by keeper.py, whose process has the port's socket as well.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from starlette.types import Receive, Scope, Send

from kvist_connector import names
from kvist_router.exposition import Exposition, metrics_response
from kvist_router.mind.interface import Refusal
from kvist_router.processes.post import Post
from kvist_router.relay.answers import send_refusal
from kvist_router.server import Served, serving
from kvist_router.settings import LimitSettings

ABSENT: Final = Refusal(
    503,
    "the router's mind has ended and is being started again; requests are routed by hash meanwhile",
    "service_unavailable",
    code="no_mind",
    retry_after=1,
)


class StandIn:
    """ASGI. Each connection has one answer, so that the next question finds the mind."""

    def __init__(self, metrics: Exposition) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET" or scope["path"] != names.PATH_METRICS:
            await send_refusal(send, ABSENT, [(b"connection", b"close")])
            return
        answer = await metrics_response(self._metrics)
        answer.headers["connection"] = "close"
        await answer(scope, receive, send)


async def stand_in(
    mind: Post,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    limits: LimitSettings,
    metrics: Exposition,
) -> None:
    """Answer whenever the mind's process has ended, until the next one serves; for ever."""
    while True:
        await mind.vacant.wait()
        async with serving(Served(StandIn(metrics), listener.dup(), tls, shared=True), limits):
            await mind.serves.wait()
