"""Connections of a socket that several processes share."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterator

import aiohttp
import pytest
import trustme
from starlette.types import Receive, Scope, Send

from kvist_connector.settings import validate
from kvist_router.accepting import Acceptor
from kvist_router.server import Served, Servers, listen
from kvist_router.settings import LimitSettings
from kvist_router.tls import ServerTls, TlsSettings


class Counts(asyncio.Protocol):
    """One process' connections."""

    def __init__(self, made: list[asyncio.BaseTransport]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(transport)


class Full:
    """A listening socket that has no descriptors for connections, as often as it is told."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self._listener, self.times = listener, times

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0, "port") as found:
        yield found


async def connect(listener: socket.socket, count: int) -> list[asyncio.StreamWriter]:
    pairs = [await asyncio.open_connection(*listener.getsockname()) for _ in range(count)]
    return [writer for _, writer in pairs]


async def end(writers: list[asyncio.StreamWriter], made: list[asyncio.BaseTransport]) -> None:
    for item in (*writers, *made):
        item.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def test_a_burst_of_clients_is_shared_among_those_that_listen(listener, until) -> None:
    writers = await connect(listener, 20)  # they wait in the socket's queue
    made: list[list[asyncio.BaseTransport]] = [[], []]
    inherited = listener.dup(), listener.dup()
    acceptors = [
        Acceptor(item, lambda own=own: Counts(own), None)  # type: ignore[misc]
        for item, own in zip(inherited, made, strict=True)
    ]
    await until(lambda: sum(map(len, made)) == 20)
    assert min(map(len, made)) >= 8
    acceptors[0].close()
    await acceptors[0].wait_closed()
    before = len(made[0])
    writers += await connect(listener, 5)
    await until(lambda: sum(map(len, made)) == 25)
    assert len(made[0]) == before
    acceptors[1].close()
    await end(writers, made[0] + made[1])
    for item in inherited:
        item.close()


async def test_without_descriptors_it_waits_and_goes_on(listener, until, monkeypatch, caplog) -> None:
    monkeypatch.setattr("kvist_router.accepting.PAUSE_SECONDS", 0.01)
    made: list[asyncio.BaseTransport] = []
    acceptor = Acceptor(Full(listener, 2), lambda: Counts(made), None)  # type: ignore[arg-type]
    writers = await connect(listener, 1)
    await until(lambda: len(made) == 1)
    assert caplog.text.count("Too many open files") == 2
    acceptor.close()
    await end(writers, made)


@pytest.mark.parametrize("secure", [False, True])
async def test_a_shared_port_serves_and_lets_running_answers_end(tmp_path, secure: bool) -> None:
    authority, file = trustme.CA(), tmp_path / "certificate.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))
    rest = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await rest.wait()
        await send({"type": "http.response.body", "body": b" rest"})

    listener = listen("127.0.0.1", 0, "port")
    tls = ServerTls(TlsSettings(certificate_file=file), file).context if secure else None
    served = Served(app, listener, tls, shared=True)
    servers = Servers([served], validate(LimitSettings, {}))
    running = asyncio.create_task(servers.run())
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    connector = aiohttp.TCPConnector(ssl=trusted)
    async with aiohttp.ClientSession(connector=connector) as http, http.get(served.url) as answer:
        assert await answer.content.readany() == b"first"
        address = listener.getsockname()
        servers.close()
        async with asyncio.timeout(60):
            while await _accepts(address):  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
        rest.set()
        assert await answer.content.read() == b" rest"
        await asyncio.wait_for(running, 60)


async def _accepts(address: tuple[str, int]) -> bool:
    try:
        _, writer = await asyncio.open_connection(*address)
    except ConnectionError:
        return False
    writer.close()
    return True
