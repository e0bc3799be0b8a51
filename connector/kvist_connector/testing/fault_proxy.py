"""A TCP proxy before a real server, for what a healthy server does not do when it is asked to.

Tests and the soak give its address to an agent in place of the server's own. A fault is a mode
of the proxy; it counts for connections that are open already too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_READ: Final = 65536
_MOST_HEADER: Final = 65536
_LENGTH: Final = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Pass:
    """Everything goes through."""


@dataclass(frozen=True)
class Hang:
    """Connections stay open and nothing moves."""


@dataclass(frozen=True)
class Refuse:
    """Every connection is ended without a word."""


@dataclass(frozen=True)
class Cut:
    """After so many bytes of each answer the connection is ended."""

    after: int


@dataclass(frozen=True)
class Spoil:
    """This byte of each answer is another one."""

    at: int


@dataclass(frozen=True)
class Die:
    """The client is killed when it has sent so many bytes: no connection lives longer, none is made."""

    after: int


@dataclass(frozen=True)
class Answer:
    """Each HTTP request is answered by this in place of the server."""

    status: str
    body: bytes = b""


Mode = Pass | Hang | Refuse | Cut | Spoil | Die | Answer


class FaultProxy:
    """See module. `start` before, `close` after; every connection has ended then."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._mode: Mode = Pass()
        self._moving = asyncio.Event()
        self._moving.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.answered = 0
        self.sent: list[int] = []  # by the client since `turn`, piece by piece
        self.on_piece: Callable[[], None] = lambda: None  # before each one goes on, in either direction

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None, "the proxy has not been started"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen on a free port of the loopback."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    def turn(self, mode: Mode) -> None:
        """From now on."""
        self._mode = mode
        self.sent = []
        if isinstance(mode, Hang):
            self._moving.clear()
        else:
            self._moving.set()
        if isinstance(mode, Refuse):
            self._end_all()

    async def close(self) -> None:
        """No listener, no connection."""
        if self._server is not None:
            self._server.close()
        self._end_all()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _end_all(self) -> None:
        for task in self._connections:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._moving.wait()
            if not isinstance(self._mode, Refuse):
                await self._serve(reader, writer)
        except (asyncio.CancelledError, OSError):
            pass  # ended by `turn`, `close` or either side: all the same to a proxy
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._upstream)
        link = _Link(reader, writer, from_server, to_server)
        back = asyncio.create_task(self._back(link))
        try:
            while data := await reader.read(_READ):
                await self._moving.wait()
                link.sent_back = 0
                self.on_piece()
                if isinstance(self._mode, Answer):
                    await self._answer(self._mode, data, link)
                    continue
                left = mode.after - sum(self.sent) if isinstance(mode := self._mode, Die) else len(data)
                self.sent.append(len(data))
                to_server.write(data[: max(0, left)])
                await to_server.drain()
                if left < len(data):
                    self.turn(Refuse())
        finally:
            back.cancel()
            to_server.transport.abort()
            await asyncio.gather(back, return_exceptions=True)

    async def _back(self, link: _Link) -> None:
        try:
            while data := await link.from_server.read(_READ):
                await self._moving.wait()
                self.on_piece()
                mode = self._mode
                if isinstance(mode, Cut) and link.sent_back + len(data) > mode.after:
                    link.writer.write(data[: max(0, mode.after - link.sent_back)])
                    await link.writer.drain()
                    break
                if isinstance(mode, Spoil):
                    data = _spoiled(data, mode.at - link.sent_back)
                link.sent_back += len(data)
                link.writer.write(data)
                await link.writer.drain()
        finally:
            link.writer.close()

    async def _answer(self, mode: Answer, data: bytes, link: _Link) -> None:
        """Read the whole request first: a client that still sends would see a broken connection instead."""
        while b"\r\n\r\n" not in data and len(data) < _MOST_HEADER:
            more = await link.reader.read(_READ)
            if not more:
                return
            data += more
        header, _, body = data.partition(b"\r\n\r\n")
        found = _LENGTH.search(header)
        left = (int(found.group(1)) if found else 0) - len(body)
        while left > 0:
            left -= len(await link.reader.read(min(left, _READ))) or left
        head = header.startswith(b"HEAD")
        link.writer.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/xml\r\ncontent-length: %d\r\n\r\n%s"
            % (mode.status.encode(), len(mode.body), b"" if head else mode.body)
        )
        await link.writer.drain()
        self.answered += 1


def _spoiled(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    if 0 <= place < len(changed):
        changed[place] ^= 0x40
    return bytes(changed)


@dataclass
class _Link:
    """One connection and the one to the server that belongs to it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    from_server: asyncio.StreamReader
    to_server: asyncio.StreamWriter
    sent_back: int = 0
