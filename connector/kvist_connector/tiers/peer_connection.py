"""One HTTP/1.1 connection whose bodies are received straight into the caller's buffers.

A client library hands bodies out as bytes objects, which then are copied: for chunks of megabytes that was
half of the time. Heads are parsed by httptools. Used by peer_http.py; any error, and a call that is
given up, leaves the connection unusable: whoever has it closes it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final, NamedTuple

import httptools

from kvist_connector.tiers.pieces import PIECE_BYTES
from kvist_connector.tiers.socket_threads import LEAST_BYTES, Seen, receive_all
from kvist_connector.tls import LiveContext

_HEAD_BYTES: Final = 16 * 1024
# A body that nobody wanted is read away up to this, so that the connection can be kept.
_SKIPPED_BYTES: Final = 64 * 1024


class Answer(NamedTuple):
    """Head of an answer; `length` of its body, None when it does not say."""

    status: int
    length: int | None
    kept: bool  # whether the connection takes another request


class Connection:
    """`used`: whether it has answered before, so that its server may have closed it meanwhile."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._plain = sock
        self._loop = asyncio.get_running_loop()
        self._early = memoryview(b"")  # of the body, came with the head
        self._left = 0  # bytes of the body not received yet
        self.used = False
        self.answered = False  # something of the present answer has come

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        """Raises OSError of the last address tried."""
        loop = asyncio.get_running_loop()
        failure: OSError = OSError(f"{host} has no address")
        for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                return cls(sock)
        raise failure

    async def ask(self, request: bytes) -> Answer:
        """Send a request, receive the head of its answer. Raises OSError, or ValueError for what is none."""
        self.answered = False
        await self._send(request)
        buffer, got, end = bytearray(_HEAD_BYTES), 0, -1
        while end < 0:
            if got == _HEAD_BYTES:
                raise ValueError(f"the head of an answer is longer than {_HEAD_BYTES} bytes")
            count = await self._recv_into(memoryview(buffer)[got:])
            if not count:
                raise ConnectionResetError("the connection was closed")
            self.answered = True
            got += count
            end = buffer.find(b"\r\n\r\n", 0, got)
        answer = _parsed(bytes(buffer[: end + 4]))
        self._early = memoryview(buffer)[end + 4 : got]
        self._left = answer.length or 0
        self.used = True
        return answer

    async def receive(self, into: Sequence[memoryview], seen: Seen | None = None) -> int:
        """Fill the buffers with what comes next of the body; the bytes filled. `seen` as in base.Read."""
        filled = 0
        for view in into:
            rest = view.cast("B")[: self._left]
            while rest.nbytes:
                count = await self._some(rest, seen)
                rest = rest[count:]
                filled += count
        return filled

    async def finish(self) -> bool:
        """Whether nothing of the body is left: a short rest is read away."""
        if self._left > _SKIPPED_BYTES:
            return False
        await self.receive([memoryview(bytearray(self._left))])
        return True

    def close(self) -> None:
        """End it."""
        self._socket.close()

    @property
    def _socket(self) -> socket.socket:
        assert self._plain is not None, "there is none"
        return self._plain

    async def _send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def _recv_into(self, view: memoryview) -> int:
        return await self._loop.sock_recv_into(self._socket, view)

    async def _recv_much(self, view: memoryview, seen: Seen | None) -> int:
        return await receive_all(self._socket, view, seen)

    async def _some(self, view: memoryview, seen: Seen | None) -> int:
        if self._early.nbytes:
            count = min(self._early.nbytes, view.nbytes)
            view[:count] = self._early[:count]
            self._early = self._early[count:]
        elif view.nbytes < LEAST_BYTES:
            count = await self._recv_into(view)
        else:
            count, view = await self._recv_much(view, seen), view[:0]
        if not count:
            raise ConnectionResetError(f"the connection was closed {self._left} bytes before the end")
        if seen is not None and view.nbytes:
            seen(view[:count])
        self._left -= count
        return count


class TlsConnection(Connection):
    """The same under TLS, whose bytes are unpacked in between and so are copied."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open_tls(cls, host: str, port: int, tls: LiveContext) -> TlsConnection:
        """Raises OSError, also for a certificate that is not believed."""
        reader, writer = await asyncio.open_connection(
            host, port, ssl=tls(), server_hostname=tls.name, limit=PIECE_BYTES
        )
        return cls(reader, writer)

    def close(self) -> None:
        """See Connection."""
        self._writer.transport.abort()

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def _recv_much(self, view: memoryview, seen: Seen | None) -> int:
        # Not more at a time: the copy holds the loop, and so would a checksum.
        return await self._recv_into(view[:PIECE_BYTES])

    async def _recv_into(self, view: memoryview) -> int:
        data = await self._reader.read(view.nbytes)
        view[: len(data)] = data
        return len(data)


class _Headers:
    def __init__(self) -> None:
        self.length: int | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-length":
            self.length = int(value)


def _parsed(head: bytes) -> Answer:
    headers = _Headers()
    parser = httptools.HttpResponseParser(headers)
    try:
        parser.feed_data(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise ValueError(f"the answer is not HTTP: {error}") from error
    status = int(parser.get_status_code())
    if status < 200:
        raise ValueError(f"an answer of status {status} is none")
    return Answer(status, headers.length, bool(parser.should_keep_alive()))
