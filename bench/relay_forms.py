"""Forms of the relay that bench.router compares, each served in a process of its own.

    python -m bench.relay_forms passthrough|constant --port 9000 --engine http://127.0.0.1:9100

passthrough  plain ASGI + aiohttp, engines in turn, nothing else: the limit
constant     Kvist's relay, asking a mind that always answers the same
(The router whole, with exact decisions, is `python -m kvist_router`.)
"""

from __future__ import annotations

import argparse
import asyncio
from itertools import cycle

import aiohttp
import uvloop
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from kvist_router.memory import settle_memory
from kvist_router.metrics import RelayMetrics
from kvist_router.mind.interface import Decision, Metadata, Refusal, Report
from kvist_router.relay.app import Relay
from kvist_router.relay.upstream import Upstream
from kvist_router.server import Served, Servers, listen
from kvist_router.settings import LimitSettings

CONNECTION_HEADERS = frozenset(
    {b"host", b"connection", b"keep-alive", b"content-length", b"transfer-encoding"}
)


def new_session(limits: LimitSettings) -> aiohttp.ClientSession:
    """The pass-through's client: no cookies, no decompression, no headers of its own; large reads."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=limits.connections, limit_per_host=0, keepalive_timeout=30.0, ttl_dns_cache=10
        ),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_seconds),
        read_bufsize=2**18,
    )


class PassThrough:
    """The least that relays a streaming answer: all headers both ways but those of the connection itself.

    As in Kvist's relay, status and headers wait for the first piece of the body. The relay has a
    client of its own (relay/upstream.py); this one is aiohttp's, which a relay in Python is expected to use.
    """

    def __init__(self, session: aiohttp.ClientSession, engines: list[str]) -> None:
        self._session = session
        self._engines = cycle(engines)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        pieces = []
        more = True
        while more:
            message = await receive()
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        url = next(self._engines) + scope["path"]
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in CONNECTION_HEADERS
        ]
        async with self._session.post(url, data=b"".join(pieces), headers=headers) as answer:
            piece = await answer.content.readany()
            await send(
                {
                    "type": "http.response.start",
                    "status": answer.status,
                    "headers": [
                        (name, value)
                        for name, value in answer.raw_headers
                        if name.lower() not in CONNECTION_HEADERS
                    ],
                }
            )
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await answer.content.readany()
        await send({"type": "http.response.body", "body": b""})


class ConstantMind:
    """Answers without looking."""

    def __init__(self, engines: list[str]) -> None:
        self._decisions = cycle(
            Decision("0" * 32, f"r{number}", url, 0, 4000, True) for number, url in enumerate(engines)
        )

    async def decide(self, body: bytes, metadata: Metadata) -> Decision | Refusal:
        """The next engine."""
        return next(self._decisions)

    async def report(self, request_id: str, report: Report) -> None:
        """Nothing."""


async def serve(form: str, port: int, engines: list[str]) -> None:
    """Serve one form until a signal."""
    limits = LimitSettings(drain_seconds=1)
    async with new_session(limits) as session, Upstream(limits) as upstream:
        app: ASGIApp = PassThrough(session, engines)
        if form == "constant":
            metrics = RelayMetrics(CollectorRegistry())
            app = Relay(ConstantMind(engines), upstream, limits, metrics)
        settle_memory()  # as in service, for every form
        await Servers([Served(app, listen("127.0.0.1", port, "port"))], limits).run_until_signal()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("form", choices=["passthrough", "constant"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", action="append", required=True)
    given = parser.parse_args()
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(serve(given.form, given.port, given.engine))
