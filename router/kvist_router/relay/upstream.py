"""One attempt at an engine. Called by relay/app.py.

`open` returns when the first body byte (or an empty body's end) is there, so until then the
request may go elsewhere. `close` closes the engine's connection unless the answer was read to its
end: that is how a cancelled request ends in the engine.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from urllib.parse import urlsplit

from kvist_router.errors import Refused, UpstreamError
from kvist_router.mind.interface import Refusal
from kvist_router.relay.connection import Connection
from kvist_router.relay.pool import IDLE_SECONDS, Origin, Pool
from kvist_router.relay.spool import Streamed
from kvist_router.settings import LimitSettings

MAX_ORIGINS = 1024
_NOT_IN_TARGET = re.compile(rb"[\x00-\x20\x7f]")


class Attempt:
    """An engine's answer whose first piece has arrived. `close` it in every case."""

    __slots__ = ("_closed", "_connection", "_pool", "_sending", "first", "headers", "read", "status")

    def __init__(
        self, connection: Connection, pool: Pool, first: bytes, sending: asyncio.Task[None] | None
    ) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self.first = first
        self.read = connection.read  # the next piece, b"" at the end; raises UpstreamError
        self._connection = connection
        self._pool = pool
        self._sending = sending  # of a long body, which an engine may answer before it has all of it
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether `read` would give b"" now."""
        return self._connection.ended

    def close(self) -> None:
        """Close the connection, or give it back if the answer was read to its end."""
        if not self._closed:  # the connection may serve another request by now
            self._closed = True
            self._pool.release(self._connection)
            if self._sending is not None:
                self._sending.cancel()


class Upstream:
    """Opens attempts; a context. Deadlines beyond connecting are the caller's (relay/watch.py)."""

    def __init__(
        self,
        limits: LimitSettings,
        idle_seconds: float = IDLE_SECONDS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.pool = Pool(limits.connections, limits.connect_seconds, idle_seconds, tls)
        self._origin = lru_cache(MAX_ORIGINS)(origin)

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.pool.close()

    async def open(
        self,
        base: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | Streamed,
        method: bytes = b"POST",
    ) -> Attempt:
        """Send a request; raises UpstreamError before the first body byte.

        An engine may close an idle connection just when a request is written to it. If then nothing
        came back, the request goes once more, on a new connection.
        """
        place = self._origin(base)
        head = request_head(place, target, headers, len(body), method)
        connection = await self.pool.acquire(place)
        kept = connection.used
        try:
            return await self._begin(connection, head, body)
        except UpstreamError:
            if not (kept and connection.untouched):
                raise
        return await self._begin(await self.pool.acquire(place, fresh=True), head, body)

    async def _begin(self, connection: Connection, head: bytes, body: bytes | Streamed) -> Attempt:
        attempt: Attempt | None = None
        sending: asyncio.Task[None] | None = None
        try:
            if isinstance(body, bytes):
                connection.send(head, body)
            else:
                connection.send(head, b"")
                sending = asyncio.create_task(_send_on(connection, body))
            attempt = Attempt(connection, self.pool, await connection.read(), sending)
            return attempt
        finally:
            if attempt is None:
                self.pool.release(connection)
                if sending is not None:
                    sending.cancel()


async def _send_on(connection: Connection, body: Streamed) -> None:
    try:
        await connection.send_on(body)
    except OSError:  # the file of the body: an engine that got half of it has no use for the rest
        connection.abort()


def origin(base: str) -> Origin:
    """The parts of an engine's base URL, which the settings have checked."""
    parts = urlsplit(base)
    tls = parts.scheme == "https"
    host_header = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")
    return Origin(
        base,
        parts.hostname or "",
        parts.port or (443 if tls else 80),
        tls,
        host_header,
        parts.path.rstrip("/").encode(),
    )


def request_head(
    place: Origin,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    length: int,
    method: bytes = b"POST",
) -> bytes:
    """Request line and headers; raises Refused for anything that would end a line early."""
    head = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b\r\ncontent-length: %d\r\n\r\n" % (
        method,
        place.prefix,
        target,
        place.host_header,
        b"\r\n".join([b"%b: %b" % pair for pair in headers]),
        length,
    )
    lines = len(headers) + 4  # request line, host, content-length, empty
    if (
        head.count(b"\r") != lines
        or head.count(b"\n") != lines
        or b"\0" in head
        or _NOT_IN_TARGET.search(target)
    ):
        raise Refused(Refusal(400, "control characters in the query or a header", code="invalid_header"))
    return head
