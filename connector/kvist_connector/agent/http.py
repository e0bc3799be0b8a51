"""The agent's HTTP API: health, metrics, feed and controls. docs/architecture.md has the table.

Handlers only read state or call one method of it; the named boundary for request errors is
the middleware.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from kvist_connector import names
from kvist_connector.agent.access import Access, Scope, audit
from kvist_connector.agent.controls import Controls
from kvist_connector.agent.feed import Feed
from kvist_connector.agent.selection import RequestError
from kvist_connector.errors import TierError
from kvist_connector.protocol.feed import CONTENT_TYPE

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 * 1024 * 1024
IDLE_SECONDS = 75.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN_PATHS = (names.PATH_HEALTHZ, names.PATH_READYZ)
# Of no use to whoever has no token, and asked by scrapers and the operator, which have no certificate.
_FIGURES = (names.PATH_METRICS, names.PATH_STATS)
# Questions that are POSTs because of their bodies.
_READ_PATHS = (names.PATH_LOOKUP,)


@dataclass(frozen=True)
class Status:
    """Answers of the probes: "" is well, anything else the reason why not."""

    healthy: Callable[[], str]
    ready: Callable[[], str]


class NotReady(Exception):  # noqa: N818 - a state, not a fault
    """Asked for something before the arena is reserved."""


class Api:
    """Routes of one agent."""

    def __init__(self, status: Status, metrics: Callable[[], bytes], access: Access) -> None:
        self._parts: tuple[Controls, Feed] | None = None
        self._status = status
        self._metrics = metrics
        self._access = access

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[_errors, self._authorize], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get(names.PATH_HEALTHZ, self._healthz),
                web.get(names.PATH_READYZ, self._readyz),
                web.get(names.PATH_METRICS, self._get_metrics),
                web.get(names.PATH_FEED, self._stream),
                web.post(names.PATH_LOOKUP, self._lookup),
                web.post(names.PATH_FLUSH, self._flush),
                web.get(names.PATH_DRAIN, self._draining),
                web.post(names.PATH_DRAIN_ACKNOWLEDGE, self._acknowledge),
                web.post(names.PATH_DRAIN, self._change(lambda controls: controls.drain)),
                web.post(names.PATH_PIN, self._change(lambda controls: controls.edits.pin)),
                web.post(names.PATH_UNPIN, self._change(lambda controls: controls.edits.unpin)),
                web.post(names.PATH_CLEAR, self._change(lambda controls: controls.edits.clear)),
                web.post(names.PATH_PREFETCH, self._change(lambda controls: controls.edits.prefetch)),
                web.post(names.PATH_MOVE, self._change(lambda controls: controls.edits.move)),
                web.post(names.PATH_COMPRESS, self._change(lambda controls: controls.edits.compress)),
                web.post(names.PATH_DECOMPRESS, self._change(lambda controls: controls.edits.decompress)),
                web.post(names.PATH_OFFER, self._offer),
                web.post(names.PATH_TAKE, self._change(lambda controls: controls.handover.take)),
                web.post(names.PATH_RELEASE, self._change(lambda controls: controls.handover.release)),
                web.post(names.PATH_RETIRE, self._change(lambda controls: controls.retire.retire)),
                web.post(names.PATH_RETIRED, self._change(lambda controls: controls.retire.merge)),
                web.get(names.PATH_RETIRED, self._retired),
                web.get(names.PATH_STATS, self._stats),
            ]
        )
        return app

    def ready(self, controls: Controls, feed: Feed) -> None:
        """From now on more than the probes is answered."""
        self._parts = controls, feed

    @property
    def _controls(self) -> Controls:
        return self._require()[0]

    def _require(self) -> tuple[Controls, Feed]:
        if self._parts is None:
            raise NotReady(self._status.ready())
        return self._parts

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN_PATHS and not _local(request):
            if self._access.certificates and request.path not in _FIGURES and not certified(request):
                return _error(401, "a client certificate of a CA in tls.ca_file is needed", None)
            scope = self._access.scope(request.headers.get("Authorization", ""))
            if scope is None:
                return _error(401, "missing or wrong bearer token", "Authorization")
            if scope is Scope.READ and request.method != "GET" and request.path not in _READ_PATHS:
                return _error(403, "this token may only read; give the admin token", "Authorization")
        return await handler(request)

    def _change(self, choose: Callable[[Controls], Callable[[dict[str, Any]], Awaitable[object]]]) -> Handler:
        """A control that changes something: it leaves a line in the audit log, a refused one as well.

        What routers merge every few seconds, and is known already, leaves none.
        """

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await _body(request)
            answer: object = "failed"
            try:
                answer = await choose(self._controls)(body)
            except (RequestError, TierError) as error:
                answer = str(error)
                raise
            finally:
                known = isinstance(answer, dict) and answer.get("changed") is False
                if not (known or body.get("dry_run")):
                    audit(request.path, request.remote or "local socket", body, answer)
            return _json(answer)

        return handle

    async def _healthz(self, _: web.Request) -> web.Response:
        return _probe(self._status.healthy())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _probe(self._status.ready())

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _lookup(self, request: web.Request) -> web.Response:
        return _json(await self._controls.lookup(await _body(request)))

    async def _offer(self, request: web.Request) -> web.Response:
        return _json(await self._controls.handover.offer(await _body(request)))

    async def _flush(self, request: web.Request) -> web.Response:
        return _json(await self._controls.flush(await _body(request)))

    async def _draining(self, _: web.Request) -> web.Response:
        return _json(self._controls.draining())

    async def _acknowledge(self, request: web.Request) -> web.Response:
        return _json(self._controls.acknowledge(await _body(request)))

    async def _retired(self, _: web.Request) -> web.Response:
        return _json(self._controls.retire.known)

    async def _stats(self, _: web.Request) -> web.Response:
        return _json(self._controls.stats())

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        name = request.query.get("reader", "")
        if not 0 < len(name) <= 128:
            raise RequestError("give each reader a name of 1 to 128 characters", "reader")
        feed = self._require()[1]
        reader = feed.open(name, acknowledges=request.query.get("acknowledges") == "1")
        if reader is None:
            return _error(503, "too many readers", "reader")
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        try:
            await response.prepare(request)
            while frames := await reader.take():
                await response.write(frames)
        except ConnectionResetError:
            log.debug("feed reader %s left", name)
        finally:
            feed.leave(name, reader)
        return response


def runner_of(application: web.Application, idle: float = IDLE_SECONDS) -> web.AppRunner:
    """What serves it. `idle`: seconds until a connection is closed that asks for nothing, or not to the end.

    Without that bound whoever has no token could take all file descriptors. Nothing is unpacked either: our
    own clients pack nothing.
    """
    return web.AppRunner(
        application,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        auto_decompress=False,
        keepalive_timeout=idle,
    )


def certified(request: web.Request) -> bool:
    """Whether who asks has shown a certificate; one that is not believed ends the handshake."""
    found = request.get_extra_info("ssl_object")
    return found is not None and bool(found.getpeercert())


def _local(request: web.Request) -> bool:
    """Whether it came over the Unix socket, which only our own user can open."""
    found = request.get_extra_info("socket")
    return found is not None and found.family == socket.AF_UNIX


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _error(400, str(error), error.field)
    except (NotReady, TierError) as error:
        return _error(503, str(error), None)
    except web.HTTPException as error:
        return _error(error.status, error.reason, None)


async def _body(request: web.Request) -> dict[str, Any]:
    packed = request.headers.get("Content-Encoding", "identity")
    if packed.lower() != "identity":
        raise RequestError(
            f"{packed[:40]!r} is not unpacked here: send the body as it is", "Content-Encoding"
        )
    try:
        decoded = msgspec.json.decode(await request.read() or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, web.RequestPayloadError) as error:
        raise RequestError(f"the body is not JSON: {error}", None) from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply", None) from error
    if not isinstance(decoded, dict):
        raise RequestError("the body must be a JSON object", None)
    return decoded


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def _error(status: int, message: str, field: str | None) -> web.Response:
    return web.Response(
        status=status,
        text=json.dumps({"error": {"message": message, "field": field}}),
        content_type="application/json",
    )


def _probe(reason: str) -> web.Response:
    if reason:
        return _error(503, reason, None)
    return web.json_response({"status": "ok"})
