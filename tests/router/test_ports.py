"""The router's own ports: TLS, the admin token, and clients that are slow or send no end of headers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from kvist_connector.errors import ConfigError
from kvist_connector.settings import validate
from kvist_router.settings import RouterSettings
from kvist_router.testing.engine import FakeEngine
from kvist_router.tls import ServerTls, TlsSettings

URL = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
SECONDS = 60


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificate(authority: trustme.CA, tmp_path: Path) -> Path:
    return write(authority, tmp_path / "router.pem")


def write(authority: trustme.CA, path: Path) -> Path:
    new = path.with_suffix(".new")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(new))
    os.replace(new, path)
    return path


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def post(http: aiohttp.ClientSession, url: str, **more: Any) -> int:
    async with http.post(url + URL, json=CHAT, **more) as answer:
        await answer.read()
        return answer.status


async def serial(port: int, authority: trustme.CA) -> str:
    """Of the certificate that a new connection meets."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
    found = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return str(found)


async def test_the_endpoint_speaks_tls_and_takes_a_new_certificate(
    router, http, authority, certificate
) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], tls={"certificate_file": str(certificate)})
        assert running.url.startswith("https://")
        assert running.admin_url.startswith("http://")
        assert await post(http, running.url, ssl=trusting(authority)) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await post(http, running.url)
        port = int(running.url.rpartition(":")[2])
        old = await serial(port, authority)
        write(authority, certificate)
        async with asyncio.timeout(SECONDS):
            while await serial(port, authority) == old:
                pass


async def test_the_admin_port_can_have_tls_and_clients_need_certificates(
    router, http, authority, certificate, tmp_path
) -> None:
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    tls = {"certificate_file": str(certificate), "client_ca_file": str(ca), "admin": True}
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], tls=tls)
        context = trusting(authority)
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await post(http, running.url, ssl=context)
        authority.issue_cert("client").configure_cert(context)
        assert await post(http, running.url, ssl=context) == 200
        async with http.get(running.admin_url + "/healthz", ssl=context) as answer:
            assert answer.status == 200


def test_wrong_certificates_are_refused_and_later_ones_leave_the_old(authority, tmp_path, caplog) -> None:
    file = tmp_path / "pair.pem"
    file.write_text("nonsense")
    settings = TlsSettings(certificate_file=file)
    with pytest.raises(ConfigError, match=r"pair\.pem and its key cannot be used"):
        ServerTls(settings, file)
    with pytest.raises(ConfigError, match=r"none\.pem and its key cannot be used: No such file"):
        ServerTls(settings, tmp_path / "none.pem")
    tls = ServerTls(settings, write(authority, file))
    file.write_text("nonsense!")
    tls.look()
    tls.look()
    assert caplog.text.count("stays in force") == 1
    write(authority, file)
    tls.look()
    assert "was read again" not in "".join(caplog.messages[:1])


def test_tls_without_a_certificate_is_refused() -> None:
    values = {"replicas": [{"url": "http://x"}], "tls": {"admin": True}}
    with pytest.raises(ConfigError, match=r"tls\.certificate_file is missing"):
        validate(RouterSettings, values)


@pytest.mark.parametrize(
    ("own", "agents", "needed"), [("own", "agents", "own"), ("own", None, "own"), (None, "agents", "agents")]
)
async def test_decisions_need_a_token_and_metrics_do_not(router, http, tmp_path, own, agents, needed) -> None:
    for name in ("own", "agents"):
        (tmp_path / name).write_text(f"{name}-token\n")
    settings: dict[str, Any] = {}
    if own:
        settings["admin_token_file"] = str(tmp_path / own)
    if agents:
        settings["agent"] = {"token_file": str(tmp_path / agents)}
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], **settings)

        async def get(path: str, token: str = "") -> int:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with http.get(running.admin_url + path, headers=headers) as answer:
                return int(answer.status)

        for path in ("/v1/kvist/decisions", "/v1/kvist/decisions/none"):
            assert await get(path) == 401
            assert await get(path, "wrong") == 401
            assert await get(path, f"{needed}-token") in (200, 404)
        assert await get("/v1/kvist/replicas") == (401 if own else 200)
        assert await get("/metrics") == 200
        assert await get("/healthz") == 200
        other = "agents" if needed == "own" else "own"
        async with http.post(
            running.admin_url + "/v1/kvist/lookup",
            json={"tokens": [1]},
            headers={"Authorization": f"Bearer {other}-token"},
        ) as answer:
            assert answer.status == 401
            assert (await answer.json())["error"]["param"] == "Authorization"
        (tmp_path / needed).write_text("rotated")
        assert await get("/v1/kvist/decisions", "rotated") == 200
        (tmp_path / needed).unlink()
        assert await get("/v1/kvist/decisions", "rotated") == 503


async def test_the_list_of_replicas_can_be_left_free(router, http, tmp_path) -> None:
    (tmp_path / "own").write_text("own-token\n")
    async with FakeEngine() as engine:
        running = await router(
            replicas=[{"url": engine.url}], admin_token_file=str(tmp_path / "own"), admin_list_free=True
        )
        for path, status in (("/v1/kvist/replicas", 200), ("/v1/kvist/decisions", 401)):
            async with http.get(running.admin_url + path) as answer:
                assert answer.status == status


async def test_without_any_token_only_a_loopback_address_tells_decisions(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], admin_host="0.0.0.0")
        url = running.admin_url.replace("0.0.0.0", "127.0.0.1")
        async with http.get(url + "/v1/kvist/decisions") as answer:
            assert answer.status == 403
            assert "admin_token_file" in (await answer.json())["error"]["message"]


@pytest.fixture
async def raw(router):
    """A connection to a router with little patience."""
    writers: list[asyncio.StreamWriter] = []
    async with FakeEngine() as engine:
        running = await router(
            replicas=[{"url": engine.url}],
            limits={"head_seconds": 0.2, "head_bytes": 1024, "idle_seconds": 60},
        )

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
            writers.append(writer)
            return reader, writer

        connect.engine = engine  # type: ignore[attr-defined]
        yield connect
        for writer in writers:
            writer.close()


async def answered(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and error code of what comes before the connection ends."""
    text = await asyncio.wait_for(reader.read(), SECONDS)
    head, _, body = text.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(text.split()[1]), json.loads(body)["error"]["code"]


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("data", [b"", b"\r\n", b"POST /v1", HEAD])
async def test_a_head_that_does_not_end_in_time_is_408(raw, data) -> None:
    reader, writer = await raw()
    writer.write(data)
    assert await answered(reader) == (408, "request_timeout")


@pytest.mark.parametrize("more", [b"", b"\r\n", b"GE"])
async def test_so_is_the_head_of_a_later_request(raw, more) -> None:
    reader, writer = await raw()
    body = json.dumps(CHAT).encode()
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
    length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"content-length")).split()[1])
    await reader.readexactly(length)
    if not more:
        return
    writer.write(more)
    assert await answered(reader) == (408, "request_timeout")


async def test_headers_without_end_are_431(raw) -> None:
    reader, writer = await raw()
    writer.write(HEAD + b"".join(b"x-%d: %s\r\n" % (number, b"y" * 64) for number in range(16)))
    assert await answered(reader) == (431, "headers_too_long")
    assert raw.engine.received == []


async def longer_than_a_head_may_take(raw) -> None:
    reader, _ = await raw()
    assert await answered(reader) == (408, "request_timeout")


async def test_a_slow_body_and_a_long_answer_are_not_the_heads_matter(raw) -> None:
    reader, writer = await raw()
    raw.engine.first_byte.clear()
    body = json.dumps(CHAT).encode()
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:5])
    await longer_than_a_head_may_take(raw)
    writer.write(body[5:])
    await raw.engine.wait_received(1)
    await longer_than_a_head_may_take(raw)
    raw.engine.first_byte.set()
    line = await asyncio.wait_for(reader.readline(), SECONDS)
    assert line.startswith(b"HTTP/1.1 200")


async def test_what_is_no_http_is_refused_in_the_form_of_all_errors(raw) -> None:
    reader, writer = await raw()
    writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
    assert await answered(reader) == (400, "invalid_http")


BODY = json.dumps(CHAT).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"


async def one(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of the next answer."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
    lines = head.lower().split(b"\r\n")
    length = int(next(line for line in lines if line.startswith(b"content-length")).split()[1])
    return int(head.split()[1]), await asyncio.wait_for(reader.readexactly(length), SECONDS)


@pytest.mark.parametrize(
    "offer",
    [
        H2C,
        b"upgrade: websocket\r\nconnection: keep-alive\r\nconnection: upgrade\r\n",
        b"connection: , upgrade,keep-alive\r\nupgrade: TLS/1.0, HTTP/2.0\r\n",
    ],
)
@pytest.mark.parametrize("step", [1, 7, 2**16])
async def test_an_offer_of_another_protocol_is_declined_and_the_request_answered(raw, offer, step) -> None:
    reader, writer = await raw()
    plain, offered = (HEAD + more + b"content-length: %d\r\n\r\n" % len(BODY) + BODY for more in (b"", offer))
    chunked = HEAD + offer + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    models = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + offer + b"\r\n"
    sent = offered + models + plain + chunked + offered
    for start in range(0, len(sent), step):
        writer.write(sent[start : start + step])
    assert [(await one(reader))[0] for _ in range(5)] == [200] * 5
    assert [request.body for request in raw.engine.received] == [BODY] * 4
    for request in raw.engine.received:
        assert not {"upgrade", "http2-settings", "connection"} & {name.lower() for name in request.headers}


@pytest.mark.parametrize(
    "head",
    [
        b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        HEAD + H2C + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        HEAD + H2C + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    ],
)
async def test_an_offer_hides_nothing_that_is_no_http(raw, head) -> None:
    reader, writer = await raw()
    writer.write(head)
    assert await answered(reader) == (400, "invalid_http")
    assert raw.engine.received == []


async def test_the_head_with_an_offer_has_the_same_limits(raw) -> None:
    reader, writer = await raw()
    writer.write(HEAD + H2C + b"".join(b"x-%d: %s\r\n" % (number, b"y" * 64) for number in range(16)))
    assert await answered(reader) == (431, "headers_too_long")
    reader, writer = await raw()
    writer.write(HEAD + H2C)
    assert await answered(reader) == (408, "request_timeout")


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize("step", [1, 2**16])
async def test_trailers_are_no_headers(raw, step) -> None:
    reader, writer = await raw()
    sent = CHUNKED + b"x-tenant: other\r\nx-late: 1\r\n\r\n"
    for start in range(0, len(sent), step):
        writer.write(sent[start : start + step])
    assert (await one(reader))[0] == 200
    assert not {"x-tenant", "x-late"} & raw.engine.received[0].headers.keys()


@pytest.mark.parametrize("more", [b"x: %s\r\n", b"%s"])
async def test_trailers_without_end_are_431(raw, more) -> None:
    reader, writer = await raw()

    async def send() -> None:
        writer.write(CHUNKED)
        while not writer.is_closing():
            writer.write(more % (b"y" * 64))
            await writer.drain()

    sending, came = asyncio.create_task(send()), b""
    with contextlib.suppress(ConnectionError):  # what is unread when it closes may reset the connection
        while piece := await asyncio.wait_for(reader.read(4096), SECONDS):
            came += piece
    writer.close()
    await asyncio.gather(sending, return_exceptions=True)
    assert not came or came.startswith(b"HTTP/1.1 431")
    assert raw.engine.received == []


async def test_nothing_is_said_in_the_middle_of_an_answer(raw) -> None:
    reader, writer = await raw()
    raw.engine.rest.clear()
    body = json.dumps({**CHAT, "stream": True}).encode()
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    await asyncio.wait_for(reader.readuntil(b"data: "), SECONDS)
    writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
    assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), SECONDS)
    await asyncio.wait_for(raw.engine.received[0].ended.wait(), SECONDS)
