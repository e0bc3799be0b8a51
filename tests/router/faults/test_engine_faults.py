"""Engines that hang, break off, talk nonsense or vanish: the client hears of it, and nothing is left."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from typing import Any

import pytest

from kvist_router.testing.faults import ASKED, EVENTS, OK, RawEngine, Script, ask, page, reset, well

EVENT = b'data: {"n": 1}\n\n'
PART = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
QUICK = {"first_byte_seconds": 0.3, "idle_seconds": 0.3, "retry_ratio": 0}


def says(data: bytes, end: str = "hang") -> Script:
    """Write, then hang, close or reset."""

    async def script(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if end == "hang":
            await engine.gone.wait()
        elif end == "reset":
            await reset(writer)
        elif end == "close":
            writer.close()

    return script


# What an engine does; status at the client, what comes of the body at least, whether that was a whole answer.
ENDLESS = b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 2**15
FAULTS: list[tuple[str, Script, int, bytes, bool]] = [
    ("hangs before headers", says(b""), 504, b"upstream_timeout", True),
    ("hangs in headers", says(b"HTTP/1.1 200 OK\r\ncontent-"), 504, b"upstream_timeout", True),
    ("hangs after headers", says(EVENTS), 504, b"upstream_timeout", True),
    ("hangs in mid-stream", says(EVENTS + PART), 200, EVENT, False),
    ("hangs in half a chunk", says(EVENTS + PART + PART[:9]), 200, EVENT, False),
    ("garbage", says(b"\0\1\2 garbage\r\n\r\n" * 99, "close"), 502, b"upstream_failed", True),
    ("garbage after headers", says(EVENTS + b"zzz\r\n", "close"), 502, b"upstream_failed", True),
    ("garbage in mid-stream", says(EVENTS + PART + b"zzz\r\n", "close"), 200, b"upstream_failed", False),
    ("half a chunk", says(EVENTS + PART + PART[:9], "close"), 200, b"upstream_failed", False),
    ("too long a content-length", says(OK.replace(b": 2", b": 9"), "close"), 200, b"{}", False),
    ("too short a content-length", says(OK + b"more of it", "close"), 200, b"{}", True),
    ("no number as content-length", says(OK.replace(b": 2", b": x"), "close"), 502, b"upstream_failed", True),
    ("reset before headers", says(b"", "reset"), 502, b"upstream_failed", True),
    ("reset in mid-stream", says(EVENTS + PART, "reset"), 200, EVENT, False),
    ("headers without end", says(ENDLESS), 502, b"upstream_failed", True),
    ("500", says(b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno", "go on"), 500, b"no", True),
    ("503 without end", says(b"HTTP/1.1 503 No\r\ncontent-length: 9\r\n\r\nno", "reset"), 503, b"no", False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "status", "came", "whole"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS]
)
async def test_the_client_hears_of_it_and_nothing_is_left(
    router, http, until, at_rest, script, status, came, whole
) -> None:
    async with RawEngine(script) as engine:
        running = await router(replicas=[{"url": engine.url}], limits=QUICK)
        answers = await asyncio.gather(*(ask(http, running.url) for _ in range(5)))
        for found in answers:
            assert (found[0], found[2]) == (status, whole), found
            assert came in found[1]
        await at_rest(running)
        assert await page(http, running.url, "/healthz") == 200
        assert len(running.mind.records) == 5
        engine.script = well
        running.mind.replicas[next(iter(running.mind.replicas))].breaker.reset()
        await until(lambda: all(item.healthy for item in running.mind.replicas.values()))
        assert await ask(http, running.url) == (200, b"{}", True)


async def test_a_burst_of_5xx_is_retried_within_the_budget_and_then_kept_away(router, http, at_rest) -> None:
    bad = says(b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno", "go on")
    async with RawEngine(bad) as broken, RawEngine() as whole:
        running = await router(
            replicas=[{"name": "broken", "url": broken.url}, {"name": "whole", "url": whole.url}],
            policy="round-robin",
            health={"interval_seconds": 0.05, "timeout_seconds": 60, "breaker_seconds": 3600},
        )
        found = [await ask(http, running.url) for _ in range(30)]
        # The budget begins with ten retries and five failures open the breaker: no client has seen one.
        assert {status for status, _, _ in found} == {200}
        assert broken.asked == 5
        await at_rest(running)


async def test_when_every_engine_fails_retries_end_with_the_budget_and_what_is_answered_earns_more(
    router, http, at_rest
) -> None:
    bad = says(b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno", "go on")
    async with RawEngine(bad) as one, RawEngine(bad) as two:
        running = await router(
            replicas=[{"name": "one", "url": one.url}, {"name": "two", "url": two.url}],
            policy="round-robin",
            limits={"retry_ratio": 0.25},
            health={"interval_seconds": 3600, "breaker_failures": 10**6},
        )

        async def retries(requests: int) -> int:
            before = one.asked + two.asked
            found = [await ask(http, running.url) for _ in range(requests)]
            assert {status for status, _, _ in found} == {503}
            return one.asked + two.asked - before - requests

        # Ten at the start, and a quarter for each request: 12 of them have one each, then every fourth has.
        assert await retries(12) == 12
        assert 8 <= await retries(40) <= 11
        one.script = two.script = well
        assert [await ask(http, running.url) for _ in range(40)] == [(200, b"{}", True)] * 40
        one.script = two.script = bad
        assert await retries(10) == 10
        await at_rest(running)


async def test_an_engine_that_stops_answering_gets_nothing_after_the_stated_checks(
    router, http, until, at_rest
) -> None:
    async def hangs(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.gone.wait()

    async with RawEngine() as dead, RawEngine() as alive:
        health = {"interval_seconds": 0.05, "timeout_seconds": 0.5, "failures": 2}
        running = await router(
            replicas=[{"name": "dead", "url": dead.url}, {"name": "alive", "url": alive.url}],
            policy="round-robin",
            health=health,
            limits={"first_byte_seconds": 60},
        )
        dead.script, dead.silent = hangs, True
        replica = running.mind.replicas["dead"]
        await until(lambda: not replica.healthy)
        # Until then: `failures` checks, each with its timeout, and no more.
        assert dead.ignored == health["failures"]
        asked = dead.asked
        found = [await ask(http, running.url) for _ in range(20)]
        assert found == [(200, b"{}", True)] * 20
        assert (dead.asked, "no answer in time" in replica.problem) == (asked, True)
        await at_rest(running)
        assert await page(http, running.url, "/readyz") == 200


async def test_health_pages_tell_the_truth_while_engines_come_and_go(router, http, until, at_rest) -> None:
    async with RawEngine() as engine:
        running = await router(
            replicas=[{"url": engine.url}], health={"interval_seconds": 0.05, "timeout_seconds": 0.5}
        )
        replica = next(iter(running.mind.replicas.values()))
        assert await page(http, running.url, "/readyz") == 200
        engine.silent = True
        await until(lambda: not replica.healthy)
        async with http.get(running.url + "/readyz") as answer:
            assert answer.status == 503
            assert "no answer in time" in (await answer.json())["reason"]
        assert await page(http, running.url, "/healthz") == 200  # the process is well: no reason to kill it
        status, came, _ = await ask(http, running.url)
        assert (status, json.loads(came)["error"]["code"]) == (503, "no_replica")
        engine.silent = False
        await until(lambda: replica.healthy)
        assert await page(http, running.url, "/readyz") == 200
        await at_rest(running)


async def test_a_name_that_no_longer_resolves_takes_the_engine_out_until_it_does(
    router, http, until, at_rest, monkeypatch
) -> None:
    def gone(host: str, *more: Any, **named: Any) -> Any:
        if host == "localhost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, *more, **named)

    known = socket.getaddrinfo
    async with RawEngine() as named, RawEngine() as other:
        url = named.url.replace("127.0.0.1", "localhost")
        running = await router(
            replicas=[{"name": "named", "url": url}, {"name": "other", "url": other.url}],
            policy="round-robin",
            limits={"connections": 2},  # a kept connection would need no name
        )
        replica = running.mind.replicas["named"]
        with monkeypatch.context() as patched:
            patched.setattr(socket, "getaddrinfo", gone)
            replica.unreachable("the test took its connections")
            async with asyncio.timeout(60):
                found = [await ask(http, running.url) for _ in range(10)]
            assert found == [(200, b"{}", True)] * 10
        await until(lambda: replica.healthy)
        asked = named.asked
        async with asyncio.timeout(60):
            while named.asked == asked:
                assert await ask(http, running.url) == (200, b"{}", True)
        await at_rest(running)


async def test_a_body_that_an_engine_does_not_read_ends_with_the_deadline(router, http, at_rest) -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            body = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
            writer.write(
                b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
        else:
            reader._transport.pause_reading()
            await over.wait()
        writer.close()

    over = asyncio.Event()
    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        running = await router(
            replicas=[{"url": url}],
            limits={**QUICK, "body_bytes": 2**27, "body_memory_bytes": 2**16},
        )
        content = [{"type": "image_url", "image_url": {"url": "x" * 2**24}}]
        body = {**ASKED, "messages": [{"role": "user", "content": content}]}
        status, came, _ = await ask(http, running.url, data=io.BytesIO(json.dumps(body).encode()))
        assert (status, json.loads(came)["error"]["code"]) == (504, "upstream_timeout")
        await at_rest(running)
        over.set()
