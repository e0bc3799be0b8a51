"""The port on which other agents read chunks of this one. Wire format: protocol/peer.py.

Bodies go from the arena's file to the socket by sendfile. The kernel sends from the arena's own
pages, also after sendfile has returned; so an object stays open until its reader has asked for
something else on the same connection, or for LINGER_SECONDS: after that the reader finds out by itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, BinaryIO, Final

import msgspec
from aiohttp import web

from kvist_connector import names
from kvist_connector.agent.access import Access, Scope
from kvist_connector.agent.http import certified
from kvist_connector.agent.selection import RequestError
from kvist_connector.agent.shelf import Opened, Shelf
from kvist_connector.errors import TierError
from kvist_connector.protocol.peer import (
    CONTENT_TYPE,
    MAX_BODY_BYTES,
    Question,
    Sizes,
    Taken,
    name_of,
)
from kvist_connector.tiers.socket_threads import LEAST_BYTES, send_file

LINGER_SECONDS: Final = 1.0
_FIRST_BYTES: Final = 4096
# Reads that wait for their turn, for each one that may run.
_WAITING: Final = 4
_PIECE: Final = 2**20  # bytes copied at a time under TLS
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PeerApi:
    """`reads`: how many objects are sent at a time; `deadline`: seconds that one may take; `take`: what is
    done when a peer asks to take chunks from it."""

    def __init__(
        self,
        shelf: Shelf,
        access: Access,
        reads: int,
        deadline: float,
        linger: float = LINGER_SECONDS,
        take: Callable[[dict[str, Any]], Awaitable[Taken]] | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        self._take = take
        self._shelf = shelf
        self._access = access
        self._deadline = deadline
        self._linger = linger
        self._turn = asyncio.Semaphore(reads)
        self._waiting = 0
        self._most_waiting = reads * _WAITING
        self._open: dict[Hashable, tuple[Opened, asyncio.TimerHandle]] = {}
        self._closed = asyncio.Event()  # the next of them
        self.counts = Counter[str]() if counts is None else counts

    async def settled(self) -> None:
        """What has been sent by now is closed, which takes no longer than an object lingers."""
        before = dict(self._open)
        while any(self._open.get(connection) is entry for connection, entry in before.items()):
            await self._closed.wait()

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._authorize], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post(names.PATH_PEER_ASK, self._ask),
                web.get(names.PATH_PEER_CHUNKS + "/{name}", self._chunk),
                web.post(names.PATH_PEER_TAKE, self._given),
            ]
        )
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        for connection in list(self._open):
            self._consumed(connection)

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._consumed(request.protocol)
        if self._access.certificates and not certified(request):
            self.counts["peer_refused"] += 1
            return web.Response(status=401, text="a client certificate of a CA in tls.ca_file is needed")
        # Chunks are what prompts were made into: whoever may read them may do everything.
        if self._access.scope(request.headers.get("Authorization", "")) is not Scope.ADMIN:
            self.counts["peer_refused"] += 1
            return web.Response(status=401, text="missing or wrong bearer token")
        return await handler(request)

    async def _ask(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.msgpack.decode(await request.read(), type=Question)
        except msgspec.DecodeError as error:
            return web.Response(status=400, text=f"not a question: {error}")
        self.counts["peer_asked"] += 1
        sizes = Sizes(sizes=tuple(self._shelf.sizes(asked.names)))
        return web.Response(body=msgspec.msgpack.encode(sizes), content_type=CONTENT_TYPE)

    async def _given(self, request: web.Request) -> web.Response:
        if self._take is None:
            return web.Response(status=404, text="nothing is taken here")
        try:
            body = msgspec.json.decode(await request.read(), type=dict[str, Any])
            taken = await self._take(body)
        except (msgspec.DecodeError, RecursionError, RequestError) as error:
            return web.Response(status=400, text=str(error))
        except TierError as error:
            return web.Response(status=503, text=str(error))
        return web.Response(body=msgspec.json.encode(taken), content_type="application/json")

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        name = name_of(request.match_info["name"])
        if name is None:
            return web.Response(status=400, text="not a name")
        if self._waiting >= self._most_waiting:
            self.counts["peer_busy"] += 1
            return web.Response(status=503, text="too many reads")
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            async with asyncio.timeout(self._deadline):
                return await self._serve(request, name)
        except TimeoutError:
            self.counts["peer_late"] += 1
            return _cut(request)
        finally:
            self._turn.release()

    async def _serve(self, request: web.Request, name: bytes) -> web.StreamResponse:
        found = await self._shelf.open(name)
        if found is None:
            return web.Response(status=404, text="not there")
        sent = False
        try:
            response = await _send(request, found)
            sent = True
        except ConnectionError:
            self.counts["peer_left"] += 1
            return _cut(request)
        finally:
            if not sent:
                found.close()
        self.counts["peer_sent"] += 1
        self.counts["bytes_sent_peer"] += found.size
        self._keep(request.protocol, found)
        return response

    def _keep(self, connection: Hashable, found: Opened) -> None:
        loop = asyncio.get_running_loop()
        self._open[connection] = found, loop.call_later(self._linger, self._consumed, connection)

    def _consumed(self, connection: Hashable) -> None:
        found = self._open.pop(connection, None)
        if found is not None:
            found[1].cancel()
            found[0].close()
            self._closed.set()
            self._closed = asyncio.Event()


async def _send(request: web.Request, found: Opened) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
    response.content_length = found.size
    await response.prepare(request)
    await response.write(found.head)
    for offset, length in found.spans:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the reader has left")
        if transport.get_extra_info("sslcontext") is not None:
            sent = await _copy_span(response, found.file, offset, length)
        else:
            sent = await _send_span(transport, found.file, offset, length)
        if sent != length:
            raise ConnectionResetError("the file is shorter than the object")
    await response.write_eof()
    return response


async def _copy_span(response: web.StreamResponse, file: BinaryIO, offset: int, length: int) -> int:
    """Bytes sent. Under TLS the loop's sendfile would read from the file's one position, as others do."""
    sent = 0
    while sent < length:
        most = min(_PIECE, length - sent)
        data = await asyncio.to_thread(os.pread, file.fileno(), most, offset + sent)
        if not data:
            break
        await response.write(data)
        sent += len(data)
    return sent


async def _send_span(transport: asyncio.Transport, file: BinaryIO, offset: int, length: int) -> int:
    """Bytes sent, most of them by a thread."""
    loop = asyncio.get_running_loop()
    sock = transport.get_extra_info("socket")
    if length < LEAST_BYTES or sock is None:
        return await loop.sendfile(transport, file, offset, length)
    # With what the transport still holds; then it writes nothing until the answer's end.
    first = await loop.sendfile(transport, file, offset, _FIRST_BYTES)
    # A socket of its own: the transport may close the other one meanwhile.
    with socket.socket(fileno=os.dup(sock.fileno())) as own:
        transport.pause_reading()  # who has left is found out by sending, as above
        try:
            return first + await send_file(own, file.fileno(), offset + first, length - first)
        finally:
            transport.resume_reading()


def _cut(request: web.Request) -> web.StreamResponse:
    """End the connection: what was sent of an object is no answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=503)
