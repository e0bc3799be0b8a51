"""A fast stand-in for an engine, in a process of its own: streams a fixed answer to every request.

    python -m bench.mock_engine --port 9100 [--pieces 16]

Plain asyncio protocol: it must not be what limits a bench of the router. Every piece of the
answer is written in an iteration of its own, as an engine's steps would.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

import msgspec
import uvloop

MODEL = "mock"
PIECE = (
    b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" a"}}]}\n\n'
)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One piece in HTTP's chunked form."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    """One connection; requests one after the other."""

    def __init__(self, pieces: int) -> None:
        self._pieces = [chunk(PIECE)] * pieces
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        """Answer when the request is whole."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        length = 0
        if (at := head.find(b"content-length:")) >= 0:
            length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        if len(self._buffer) >= end + 4 + length:
            del self._buffer[: end + 4 + length]
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        assert self._transport is not None
        if head.startswith(b"post"):
            self._transport.write(HEAD)
            asyncio.get_running_loop().call_soon(self._next, 0)
            return
        card = {"id": MODEL, "object": "model", "max_model_len": 131072}
        body = msgspec.json.encode({"object": "list", "data": [card]})
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def _next(self, index: int) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if index == len(self._pieces):
            self._transport.write(LAST)
            return
        self._transport.write(self._pieces[index])
        asyncio.get_running_loop().call_soon(self._next, index + 1)


async def serve(port: int, pieces: int) -> None:
    """Listen until the process ends."""
    server = await asyncio.get_running_loop().create_server(lambda: Engine(pieces), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pieces", type=int, default=16)
    given = parser.parse_args()
    uvloop.run(serve(given.port, given.pieces))
