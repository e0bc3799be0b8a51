"""The relay's client against an engine that says whatever the test wants, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvist_router.errors import Refused, UpstreamError
from kvist_router.relay.upstream import Attempt, Upstream
from kvist_router.settings import LimitSettings

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
TARGET = b"/v1/completions"
DEADLINE = 60.0  # only against hangs


class Engine:
    """A raw server: `answer` is called with each request, as bytes, and its connection."""

    def __init__(self, answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.ended = asyncio.Queue[None]()  # an item for every connection that is over
        self.came = asyncio.Queue[None]()  # and for every request
        self.writers: list[asyncio.StreamWriter] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.came.put_nowait(None)
                await self.answer(writer)
        writer.close()
        self.ended.put_nowait(None)


Start = Callable[..., Awaitable[Engine]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """`await start(answer)`: bytes, or a coroutine function that gets the connection's writer."""
    async with contextlib.AsyncExitStack() as stack:

        async def begin(answer: Any, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Engine:
            async def write(writer: asyncio.StreamWriter) -> None:
                writer.write(answer)

            engine = Engine(write if isinstance(answer, bytes) else answer)
            server = await asyncio.start_server(engine.serve, host, 0, ssl=tls)
            stack.callback(server.close)
            port = server.sockets[0].getsockname()[1]
            name = f"[{host}]" if ":" in host else host
            engine.url = f"{'https' if tls else 'http'}://{name}:{port}"
            stack.callback(lambda: [writer.transport.abort() for writer in engine.writers])
            return engine

        yield begin
        await asyncio.sleep(0)


Client = Callable[..., Upstream]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """`client(connections=1, idle_seconds=..)`; all of it under one deadline against hangs."""
    async with asyncio.timeout(DEADLINE), contextlib.AsyncExitStack() as stack:
        made: list[Upstream] = []

        def make(idle_seconds: float = 3600, tls: ssl.SSLContext | None = None, **limits: Any) -> Upstream:
            made.append(Upstream(LimitSettings(**limits), idle_seconds, tls))
            return made[-1]

        yield make
        for upstream in made:
            await stack.enter_async_context(upstream)


async def post(upstream: Upstream, url: str, body: bytes = b"{}", target: bytes = TARGET) -> Attempt:
    async with asyncio.timeout(DEADLINE):
        return await upstream.open(url, target, [(b"x-a", b"b")], body)


async def whole(attempt: Attempt) -> bytes:
    """The rest of an answer; the attempt is closed."""
    try:
        pieces = [attempt.first]
        while pieces[-1]:
            pieces.append(await asyncio.wait_for(attempt.read(), DEADLINE))
        return b"".join(pieces)
    finally:
        attempt.close()


async def ask(upstream: Upstream, url: str) -> bytes:
    return await whole(await post(upstream, url))


async def test_a_request_is_what_it_should_be_and_the_answer_as_it_came(start, client) -> None:
    engine = await start(b"HTTP/1.1 404 No\r\nX-Y:  z\r\nContent-Length: 3\r\n\r\nabc")
    attempt = await post(client(), engine.url + "/base/", b"body", TARGET + b"?a=b%20c")
    assert (attempt.status, attempt.headers) == (404, [(b"X-Y", b"z"), (b"Content-Length", b"3")])
    assert await whole(attempt) == b"abc"
    host = engine.url.removeprefix("http://").encode()
    assert engine.requests == [
        b"POST /base/v1/completions?a=b%20c HTTP/1.1\r\nhost: " + host + b"\r\nx-a: b\r\n"
        b"content-length: 4\r\n\r\nbody"
    ]


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK, b"ok"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            b"1\r\na\r\n2;x=y\r\nbc\r\n0\r\nt: 1\r\n\r\n",
            b"abc",
        ),
        (b"HTTP/1.1 204 No\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\na: b\r\n\r\nHTTP/1.1 103 Hints\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok", b"ok"),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 2**16])
async def test_answers_with_an_end_keep_the_connection(start, client, answer, body, step) -> None:
    async def pieces(writer: asyncio.StreamWriter) -> None:
        for begin in range(0, len(answer), step):
            writer.write(answer[begin : begin + step])
            await asyncio.sleep(0)

    engine, upstream = await start(pieces), client()
    for _ in range(3):
        attempt = await post(upstream, engine.url)
        assert attempt.status in (200, 204)
        assert (b"a", b"b") not in attempt.headers  # an interim answer's
        assert await whole(attempt) == body
    assert (engine.connections, len(upstream.pool)) == (1, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    ],
)
async def test_answers_that_end_the_connection(start, client, answer) -> None:
    async def close(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    engine, upstream = await start(close), client()
    for _ in range(2):
        assert await ask(upstream, engine.url) == b"ok"
        assert len(upstream.pool) == 0
    assert engine.connections == 2


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"garbage\r\n\r\n", "broke off"),
        (b"", "connection closed"),
        (b"HTTP/1.1 200 O", "connection closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", "connection closed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "connection closed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", "broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\nok", "broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nok", "broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok", "broke off"),
        (b"HTTP/1.1 101 Up\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", "broke off"),
        (b"HTTP/1.1 000 No\r\ncontent-length: 2\r\n\r\n{}", "status 000"),
        (b"HTTP/1.1 099 No\r\ncontent-length: 2\r\n\r\n{}", "status 099"),
        (b"HTTP/1.1 600 No\r\ncontent-length: 2\r\n\r\n{}", "status 600"),
        (b"HTTP/1.1 999 No\r\ncontent-length: 2\r\n\r\n{}", "status 999"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 2**17, "headers over"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 2**15 + b"\r\n", "headers over"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 2**13, "headers over"),
    ],
)
async def test_nonsense_before_the_first_byte_is_an_upstream_error(start, client, answer, problem) -> None:
    async def close(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    engine, upstream = await start(close), client()
    with pytest.raises(UpstreamError, match=problem) as caught:
        await post(upstream, engine.url)
    assert not caught.value.unreachable
    assert (engine.connections, len(upstream.pool)) == (1, 0)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\nz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n5\r\n",
    ],
)
async def test_an_answer_that_breaks_off_gives_what_came_and_then_an_error(start, client, answer) -> None:
    async def close(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    engine, upstream = await start(close), client()
    attempt = await post(upstream, engine.url)
    assert attempt.first == b"ok"
    with pytest.raises(UpstreamError, match="broke off"):
        await attempt.read()
    attempt.close()
    assert len(upstream.pool) == 0


async def test_a_reset_does_not_end_an_answer_that_lasts_until_the_connection_ends(start, client) -> None:
    async def reset(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nok")
        await seen.wait()
        sock = writer.get_extra_info("socket")
        # Lingering for 0 seconds means that closing sends a reset.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    seen = asyncio.Event()
    engine = await start(reset)
    attempt = await post(client(), engine.url)
    seen.set()
    with pytest.raises(UpstreamError, match="broke off"):
        await attempt.read()
    attempt.close()


async def test_bytes_beyond_the_answer_end_the_connection(start, client) -> None:
    engine, upstream = await start(OK + OK), client()
    assert await ask(upstream, engine.url) == b"ok"
    assert await ask(upstream, engine.url) == b"ok"
    assert engine.connections == 2


@pytest.mark.parametrize("how", ["close", "unasked"])
async def test_an_idle_connection_that_the_engine_ends_is_not_used_again(start, client, until, how) -> None:
    engine, upstream = await start(OK), client()
    await ask(upstream, engine.url)
    if how == "close":
        engine.writers[0].close()
    else:
        engine.writers[0].write(OK)
    await until(lambda: len(upstream.pool) == 0)
    assert await ask(upstream, engine.url) == b"ok"
    assert (engine.connections, len(engine.requests)) == (2, 2)


async def test_a_kept_connection_that_dies_before_a_byte_came_is_replaced_once(start, client) -> None:
    async def second_time_nothing(writer: asyncio.StreamWriter) -> None:
        if len(engine.requests) in answered:
            writer.write(OK)
        else:
            writer.transport.abort()

    answered = {1, 3}
    engine, upstream = await start(second_time_nothing), client()
    assert await ask(upstream, engine.url) == b"ok"
    assert await ask(upstream, engine.url) == b"ok"  # request 2 failed, 3 replaced it
    assert (engine.connections, len(engine.requests)) == (2, 3)
    with pytest.raises(UpstreamError):  # 4 on the kept connection, 5 on a new one
        await ask(upstream, engine.url)
    with pytest.raises(UpstreamError):  # 6 on a new one: no second try
        await ask(upstream, engine.url)
    assert len(engine.requests) == 6


async def test_a_kept_connection_that_dies_after_a_byte_is_not_replaced(start, client) -> None:
    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(OK if len(engine.requests) == 1 else b"H")
        if len(engine.requests) > 1:
            writer.close()

    engine, upstream = await start(half), client()
    await ask(upstream, engine.url)
    with pytest.raises(UpstreamError):
        await ask(upstream, engine.url)
    assert len(engine.requests) == 2


async def test_idle_connections_are_closed_after_a_while(start, client) -> None:
    engine, upstream = await start(OK), client(idle_seconds=0.05)
    await ask(upstream, engine.url)
    await asyncio.wait_for(engine.ended.get(), DEADLINE)
    assert len(upstream.pool) == 0
    assert await ask(upstream, engine.url) == b"ok"


async def test_close_before_the_end_ends_the_request_in_the_engine(start, client) -> None:
    engine, upstream = await start(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok"), client()
    attempt = await post(upstream, engine.url)
    attempt.close()
    await asyncio.wait_for(engine.ended.get(), DEADLINE)
    assert len(upstream.pool) == 0


async def test_cancelled_before_the_first_byte_ends_the_request_in_the_engine(start, client) -> None:
    engine, upstream = await start(b""), client()
    task = asyncio.create_task(post(upstream, engine.url))
    await asyncio.wait_for(engine.came.get(), DEADLINE)
    task.cancel()
    await asyncio.wait_for(engine.ended.get(), DEADLINE)
    assert len(upstream.pool) == 0


async def test_an_answer_before_the_request_was_read_ends_the_connection(start, client) -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine.writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)

    engine = await start(OK)
    engine.serve = deaf
    server = await asyncio.start_server(lambda *pair: engine.serve(*pair), "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        upstream = client()
        assert await whole(await post(upstream, url, b"x" * 2**26)) == b"ok"
        assert len(upstream.pool) == 0


async def test_reading_pauses_while_nobody_takes_what_came(start, client) -> None:
    size, sent = 2**26, []

    async def much(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        piece = b"x" * 2**16
        for _ in range(size // len(piece)):
            writer.write(piece)
            sent.append(len(piece))
            try:
                async with asyncio.timeout(0.2):
                    await writer.drain()
            except TimeoutError:
                full.set()
                await writer.drain()

    full = asyncio.Event()
    engine = await start(much)
    attempt = await post(client(), engine.url)
    await asyncio.wait_for(full.wait(), DEADLINE)  # the engine cannot go on
    assert sum(sent) < size
    assert len(await whole(attempt)) == size


async def test_no_more_connections_than_allowed(start, client) -> None:
    engine, upstream = await start(OK), client(connections=2)
    held = [await post(upstream, engine.url) for _ in range(2)]
    waiting = [asyncio.create_task(ask(upstream, engine.url)) for _ in range(3)]
    for attempt in held:
        await whole(attempt)
    assert await asyncio.gather(*waiting) == [b"ok"] * 3
    assert (engine.connections, len(upstream.pool)) == (2, 2)


async def test_who_finds_no_free_connection_waits_until_the_deadline(start, client) -> None:
    engine, upstream = await start(OK), client(connections=1, connect_seconds=0.5)
    held = await post(upstream, engine.url)
    with pytest.raises(UpstreamError, match="no free connection in time, limit 1") as caught:
        await post(upstream, engine.url)
    assert not caught.value.unreachable  # the engine has done nothing wrong
    await whole(held)
    assert await ask(upstream, engine.url) == b"ok"
    assert engine.connections == 1


async def test_an_idle_connection_of_another_engine_makes_room(start, client) -> None:
    first, second, upstream = await start(OK), await start(OK), client(connections=1)
    assert await ask(upstream, first.url) == b"ok"
    held = await post(upstream, second.url)
    await asyncio.wait_for(first.ended.get(), DEADLINE)
    task = asyncio.create_task(ask(upstream, first.url))
    await asyncio.sleep(0)
    await whole(held)
    assert await task == b"ok"
    assert len(upstream.pool) == 1


async def test_a_place_that_comes_to_a_cancelled_request_goes_to_the_next(start, client) -> None:
    engine, upstream = await start(OK), client(connections=1)
    held = await post(upstream, engine.url)
    tasks = [asyncio.create_task(ask(upstream, engine.url)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await whole(held)
    tasks[1].cancel()  # the connection is its already
    assert await tasks[2] == b"ok"
    assert len(upstream.pool) == 1


async def test_an_engine_that_refuses_or_does_not_exist_is_unreachable(start, client) -> None:
    upstream = client()
    for url in ("http://127.0.0.1:1", "http://no.such.host.invalid"):
        with pytest.raises(UpstreamError, match="cannot connect") as caught:
            await post(upstream, url)
        assert caught.value.unreachable
    assert len(upstream.pool) == 0


async def test_connecting_has_a_deadline(client, monkeypatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    upstream = client(connect_seconds=0.01)
    with pytest.raises(UpstreamError, match="no connection in time") as caught:
        await post(upstream, "http://127.0.0.1:1")
    assert caught.value.unreachable
    assert len(upstream.pool) == 0


@pytest.mark.parametrize(
    ("target", "header"),
    [
        (TARGET + b"?a\r\nx: y", (b"a", b"b")),
        (TARGET + b"?a b", (b"a", b"b")),
        (TARGET, (b"a", b"b\r\nx: y")),
        (TARGET, (b"a", b"b\n")),
        (TARGET, (b"a\r", b"b")),
        (TARGET, (b"a", b"b\0")),
    ],
)
async def test_nothing_can_be_smuggled_into_a_request(start, client, target, header) -> None:
    engine = await start(OK)
    with pytest.raises(Refused) as caught:
        await client().open(engine.url, target, [header], b"{}")
    assert caught.value.refusal.status == 400
    assert engine.connections == 0


async def test_ipv6(start, client) -> None:
    try:
        engine = await start(OK, host="::1")
    except OSError:
        pytest.skip("no IPv6 on this machine")
    assert await ask(client(), engine.url) == b"ok"
    assert b"host: [::1]:" in engine.requests[0]


async def test_https_checks_the_engines_certificate(start, client, tmp_path) -> None:
    certificate = own_certificate(tmp_path)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate)
    engine = await start(OK, tls=serving)
    trusting = client(tls=ssl.create_default_context(cafile=certificate))
    for _ in range(2):
        assert await ask(trusting, engine.url) == b"ok"
    assert engine.connections == 1
    with pytest.raises(UpstreamError, match="cannot connect") as caught:
        await post(client(), engine.url)
    assert caught.value.unreachable


def own_certificate(folder: Path) -> Path:
    """A PEM file with a key and a certificate for 127.0.0.1 that it signed itself."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "engine.pem"
    signed = builder.sign(key, hashes.SHA256())
    path.write_bytes(pem + signed.public_bytes(serialization.Encoding.PEM))
    return path
