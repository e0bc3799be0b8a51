"""Engines that say whatever a test wants, byte by byte, and clients that tell what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

SECONDS = 60.0  # only a hang takes longer
CHAT = "/v1/chat/completions"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CARD = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 8192}]}

Script = Callable[["RawEngine", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawEngine:
    """Passes its checks; what it does with a request is `script`. `silent`: no check is answered any more."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or well
        self.silent = False
        self.asked = self.checked = self.ignored = 0
        self.gone = asyncio.Event()  # set for good when a test is over: what hangs, ends
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> RawEngine:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=4096)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gone.set()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while not writer.is_closing():
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    if head.startswith(b"get"):
                        await self._check(head, writer)
                        continue
                    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                    await _skip(reader, length)
                    if b"/tokenize" in head:
                        writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")
                        continue
                    self.asked += 1
                    await self.script(self, reader, writer)
                    await writer.drain()
        finally:
            writer.transport.abort()

    async def _check(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        if self.silent:
            self.ignored += 1
            await self.gone.wait()
            return
        self.checked += 1
        body = json.dumps(_CARD).encode() if b"/v1/models" in head else b""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


async def _skip(reader: asyncio.StreamReader, length: int) -> None:
    while length:
        piece = await reader.read(min(length, 2**18))
        if not piece:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(piece)


async def well(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A whole answer."""
    writer.write(OK)


async def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, after what was written has gone out."""
    await writer.drain()
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


async def ask(
    http: aiohttp.ClientSession, url: str, path: str = CHAT, **more: Any
) -> tuple[int, bytes, bool]:
    """Status (0: none came), what came of the body, and whether that was all."""
    more = more or {"json": ASKED}
    came = b""
    try:
        async with http.post(url + path, **more) as answer:
            try:
                while piece := await answer.content.readany():
                    came += piece
            except aiohttp.ClientError:
                return answer.status, came, False
            return answer.status, came, True
    except (aiohttp.ClientError, OSError):
        return 0, came, False


async def page(http: aiohttp.ClientSession, url: str, path: str) -> int:
    """Status of a page."""
    async with http.get(url + path) as answer:
        await answer.read()
        return answer.status
