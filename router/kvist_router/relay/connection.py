"""One HTTP/1.1 connection to an engine: a request out, its answer in. Called by pool.py, upstream.py.

aiohttp's client cost more processor time than the rest of the relay together; this does only what
an answer of an engine needs. httptools parses; whoever reads awaits one future, no task, no timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Protocol, cast

import httptools

from kvist_router.errors import UpstreamError
from kvist_router.relay.headers import RawHeaders

MAX_HEAD_BYTES = 2**16
MAX_UNREAD_BYTES = 2**18


class Keeper(Protocol):
    """Hears of connections that end while nobody uses them."""

    def lost(self, connection: Connection) -> None:
        """The connection is of no use any more."""


class _BadAnswerError(Exception):
    """Raised inside the parser's callbacks; never leaves `data_received`."""


class Connection(asyncio.Protocol):
    """`send` a request, then await `read` until it gives b"". `reusable` afterwards, or `abort`."""

    def __init__(self, base: str, keeper: Keeper) -> None:
        self.base = base
        self.status = 0
        self.headers: RawHeaders = []
        self.used = False  # has served a request before
        self.untouched = True  # nothing of this request's answer has come
        self.complete = True  # the answer is whole
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._unread = self._head_bytes = 0
        self._busy = self._head_done = self._paused = self._keep_alive = False
        self._error: UpstreamError | None = None
        self._sending = False
        self._room: asyncio.Future[None] | None = None  # the transport has more than enough to write

    # ---- for the user

    def send(self, head: bytes, body: bytes) -> None:
        """Begin an exchange."""
        self._busy, self.complete, self.untouched = True, False, True
        self._head_done = self._keep_alive = False
        self._head_bytes, self.headers = 0, []
        if self._transport is None or self._transport.is_closing():
            self._fail("connection closed")
        else:
            self._transport.writelines((head, body))  # uvloop copies neither

    async def send_on(self, body: AsyncIterable[bytes]) -> None:
        """What `send` left of the body, as the engine takes it; ends when it takes no more."""
        self._sending = True
        async for piece in body:
            if self._transport is None or self._transport.is_closing():
                return
            self._transport.write(piece)
            if self._room is not None:
                await self._room
        self._sending = False

    async def read(self) -> bytes:
        """What has come of the body, at least a byte; b"" at its end. Raises UpstreamError."""
        while not self._pieces:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces = self._pieces
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._unread = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return piece

    @property
    def ended(self) -> bool:
        """Whether `read` would give b"" now."""
        return self.complete and not self._pieces

    def rest(self) -> bool:
        """The exchange is over: whether the connection may serve another."""
        self._busy, self.used = False, True
        transport = self._transport
        return (
            self._keep_alive
            and self.ended
            and not self._sending
            and transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() == 0  # else the engine answered before it had read all
        )

    def abort(self) -> None:
        """Close at once: in the engine this ends the request."""
        self._busy = False
        if self._transport is not None:
            self._transport.abort()

    # ---- for the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def pause_writing(self) -> None:
        """The engine is slower than we are."""
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._room is not None:
            if not self._room.done():
                self._room.set_result(None)
            self._room = None

    def data_received(self, data: bytes) -> None:
        """Parse; wake the reader."""
        if not self._busy:
            self._drop()  # bytes that nobody asked for
            return
        if self._error is not None or self._transport is None:
            return
        self.untouched = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(str(error.__context__ or error) or "not HTTP")
            return
        if not self._head_done:
            self._count(len(data))
        if self._unread > MAX_UNREAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        if self._pieces or self.complete:
            self._wake()

    def eof_received(self) -> None:
        """The engine has sent everything; the transport closes itself."""
        if not self._busy:
            self._drop()
        elif self.complete:
            return
        elif self._head_done and not _delimited(self.headers):
            self.complete = True
            self._wake()
        else:
            self._fail("connection closed")

    def connection_lost(self, error: Exception | None) -> None:
        """No more bytes."""
        if self._busy and not self.complete:
            self._fail(str(error) if error else "connection closed")
        elif not self._busy:
            self._keeper.lost(self)
        self._transport = None
        self.resume_writing()
        del self._parser  # it holds this object

    # ---- for the parser

    def on_message_begin(self) -> None:
        """An answer begins."""
        if self.complete:
            raise _BadAnswerError("more than one answer to a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which is dropped."""
        if not self._head_done:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Status and headers are there."""
        self.status = self._parser.get_status_code()
        if sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            raise _BadAnswerError(f"headers over {MAX_HEAD_BYTES} bytes")
        if self.status == 101:
            raise _BadAnswerError("a change of protocol that nobody asked for")
        if not 100 <= self.status < 600:  # no class of HTTP, so nobody could pass it on
            raise _BadAnswerError(f"status {self.status:03}")
        if self.status < 200:
            self.headers = []
        else:
            self._head_done = True

    def on_body(self, piece: bytes) -> None:
        """Part of the body."""
        self._pieces.append(piece)
        self._unread += len(piece)

    def on_message_complete(self) -> None:
        """The answer is whole, unless it was an interim one."""
        if self._head_done:
            self.complete = True
            self._keep_alive = self._parser.should_keep_alive()

    # ---- inside

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fail(f"headers over {MAX_HEAD_BYTES} bytes")

    def _fail(self, problem: str) -> None:
        self._keep_alive = False
        if not self.complete and self._error is None:
            self._error = UpstreamError(f"broke off: {problem}")
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _drop(self) -> None:
        self._keeper.lost(self)
        self.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _delimited(headers: RawHeaders) -> bool:
    """Whether the body says where it ends, so that the end of the connection is none."""
    for name, value in headers:
        name = name.lower()
        if name == b"content-length" or (
            name == b"transfer-encoding" and value.lower().rstrip().endswith(b"chunked")
        ):
            return True
    return False
