"""While the mind is away, a connection to the admin port has one answer: the next question finds the mind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvist_router.processes.stand_in import stand_in
from kvist_router.server import listen
from kvist_router.settings import LimitSettings

SECONDS = 60


async def metrics() -> bytes:
    return b"kvist_router_up 1\n"


@pytest.mark.parametrize(
    ("question", "status", "words"),
    [
        (b"GET /v1/kvist/replicas", b" 503 ", b"no_mind"),
        (b"POST /v1/kvist/retire", b" 503 ", b"no_mind"),
        (b"GET /metrics", b" 200 ", b"kvist_router_up 1"),
    ],
)
async def test_a_connection_has_one_answer(question: bytes, status: bytes, words: bytes) -> None:
    mind = SimpleNamespace(vacant=asyncio.Event(), serves=asyncio.Event())
    mind.vacant.set()
    with listen("127.0.0.1", 0, "admin_port") as listener:
        standing = asyncio.create_task(stand_in(mind, listener, None, LimitSettings(), metrics))  # type: ignore[arg-type]
        try:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(question + b" HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), SECONDS)  # to its end
            writer.close()
        finally:
            standing.cancel()
            await asyncio.gather(standing, return_exceptions=True)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status in head.partition(b"\r\n")[0]
    assert b"\r\nconnection: close" in head.lower()
    assert words in body
