"""Clients that leave, dawdle or send bombs: the others are served, and nothing of them stays."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kvist_router.testing.faults import ASKED, CHAT, RawEngine, ask, page

SECONDS = 60.0
WAVES, CLIENTS = 4, 250


def head(length: int) -> bytes:
    return f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()


def port(url: str) -> int:
    return int(url.rpartition(":")[2])


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port(url))


async def rest(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(SECONDS):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_a_thousand_clients_that_leave_take_their_requests_with_them(
    router, http, until, at_rest, serving
) -> None:
    async def hangs(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the router ends the connection
        left.append(1)

    left: list[int] = []
    body = json.dumps(ASKED).encode()
    async with RawEngine(hangs) as engine:
        running = await router(replicas=[{"url": engine.url}])
        for wave in range(1, WAVES + 1):
            clients = [await connect(running.url) for _ in range(CLIENTS)]
            for number, (_, writer) in enumerate(clients):
                sent = head(len(body)) + body
                writer.write(sent if number % 5 else sent[:-3])  # some leave in the middle of their bodies
            await until(lambda wave=wave: engine.asked == wave * CLIENTS * 4 // 5)
            assert len(serving()) >= CLIENTS * 4 // 5
            for _, writer in clients:
                writer.transport.abort()
            await at_rest(running)
        await until(lambda: len(left) == WAVES * CLIENTS * 4 // 5)
        records = running.mind.records.latest(4096)
        assert {record.outcome for record in records} == {"cancelled"}
        assert len(records) == WAVES * CLIENTS * 4 // 5


async def test_slow_heads_and_bodies_hold_nobody_up_and_end_in_time(router, http, at_rest) -> None:
    async with RawEngine() as engine:
        limits = {"head_seconds": 0.5, "body_seconds": 0.5}
        running = await router(replicas=[{"url": engine.url}], limits=limits)
        slow = [await connect(running.url) for _ in range(200)]
        for number, (_, writer) in enumerate(slow):
            writer.write(head(1000)[:-4] if number % 2 else head(1000) + b"{")
        assert [await ask(http, running.url) for _ in range(5)] == [(200, b"{}", True)] * 5
        for reader, writer in slow:
            assert (await rest(reader)).startswith(b"HTTP/1.1 408")
            writer.close()
        await at_rest(running)
        assert engine.asked == 5


async def test_bombs_in_heads_are_refused_before_they_are_kept(router, http, at_rest) -> None:
    bombs = [
        b"POST / HTTP/1.1\r\n" + b"a: b\r\n" * 10**5,
        b"POST / HTTP/1.1\r\na: " + b"b" * 10**6,
        b"POST /" + b"a" * 10**6 + b" HTTP/1.1\r\n",
        b"POST / HTTP/1.1\r\n" + b"a" * 10**6,
    ]
    async with RawEngine() as engine:
        running = await router(replicas=[{"url": engine.url}])
        for bomb in bombs:
            reader, writer = await connect(running.url)
            writer.write(bomb)
            assert (await rest(reader))[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
            writer.transport.abort()
        assert await ask(http, running.url) == (200, b"{}", True)
        assert engine.asked == 1
        await at_rest(running)


async def test_bombs_in_bodies_are_refused_in_words(router, http, at_rest) -> None:
    deep = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "a": '
    bombs: list[tuple[bytes, int]] = [
        (deep + b"[" * 10**5 + b"]" * 10**5 + b"}", 400),
        (deep + b'{"a":' * 10**5 + b"1" + b"}" * 10**5 + b"}", 400),
        (deep + b"1" * 10**5 + b"}", 200),  # a number that the engine may refuse
        (b"[" * 10**6, 400),
        (b"\xff" * 10**6, 400),
        (b"", 400),
    ]
    async with RawEngine() as engine:
        running = await router(replicas=[{"url": engine.url}])
        for bomb, status in bombs:
            found, came, whole = await ask(http, running.url, data=bomb)
            assert whole
            assert found == status or (status == 200 and found == 400), came[:200]
        await at_rest(running)
        assert await page(http, running.url, "/readyz") == 200


async def test_a_client_that_does_not_read_holds_up_no_other_and_is_dropped(
    router, http, until, at_rest
) -> None:
    piece = b"10000\r\n" + b"x" * 2**16 + b"\r\n"

    async def much(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if engine.asked > 1:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(2**10):  # 64 MiB
            writer.write(piece)
            sent.append(len(piece))
            await writer.drain()

    sent: list[int] = []
    body = json.dumps(ASKED).encode()
    async with RawEngine(much) as engine:
        running = await router(replicas=[{"url": engine.url}], limits={"idle_seconds": 0.5})
        _, writer = await connect(running.url)
        writer.transport.pause_reading()
        writer.write(head(len(body)) + body)
        await until(lambda: engine.asked == 1)
        assert await ask(http, running.url) == (200, b"{}", True)
        await until(lambda: len(running.mind.in_flight) == 0)  # idle_seconds without progress
        assert sum(sent) < 2**25  # the router read no further ahead than its buffers
        writer.transport.abort()
        await at_rest(running)


async def leaves(url: str, after: int) -> Any:
    _, writer = await connect(url)
    writer.write(head(100)[:after])
    writer.transport.abort()


async def test_connections_that_end_anywhere_in_a_head_leave_nothing(router, http, at_rest) -> None:
    async with RawEngine() as engine:
        running = await router(replicas=[{"url": engine.url}])
        await asyncio.gather(*(leaves(running.url, after) for after in range(0, len(head(100)), 3)))
        assert await ask(http, running.url) == (200, b"{}", True)
        await at_rest(running)
        assert engine.asked == 1
