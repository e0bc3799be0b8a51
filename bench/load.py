"""Load on an OpenAI endpoint over keep-alive connections, as light as Python can be: raw streams, no parsing.

Called by bench.router. A request is bytes prepared beforehand; an answer ends with the last HTTP chunk.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import uvloop

LAST = b"0\r\n\r\n"
READ_BYTES = 2**16
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Load:
    """What a run of some seconds gave."""

    requests: int
    seconds: float
    first_byte_seconds: list[float]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


def request(port: int, path: str, body: bytes) -> bytes:
    """A whole POST request."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def drive(port: int, requests: list[bytes], seconds: float) -> Load:
    """One connection per request in the list, each sending its own again and again."""
    return uvloop.run(_drive(port, requests, seconds))


async def _drive(port: int, requests: list[bytes], seconds: float) -> Load:
    begin = time.perf_counter()
    end = begin + seconds
    async with asyncio.timeout(seconds + DEADLINE_SECONDS):
        times = await asyncio.gather(*(_connection(port, item, end) for item in requests))
    first = [value for one in times for value in one]
    return Load(len(first), time.perf_counter() - begin, first)


async def _connection(port: int, data: bytes, end: float) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    first_bytes = []
    try:
        while (sent := time.perf_counter()) < end:
            writer.write(data)
            await writer.drain()
            tail = await reader.read(READ_BYTES)
            first_bytes.append(time.perf_counter() - sent)
            if not tail.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the endpoint answered {tail[:200]!r}")
            while not tail.endswith(LAST):
                piece = await reader.read(READ_BYTES)
                if not piece:
                    raise RuntimeError("the endpoint closed the connection in mid-answer")
                tail = tail[-8:] + piece
    finally:
        writer.close()
    return first_bytes
