"""Probes before the arena is reserved and after a task died; the API in this process."""

import asyncio
import json
import logging

import pytest
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import TCPSite

from kvist_connector import names
from kvist_connector.agent.access import Access
from kvist_connector.agent.http import Api, Status, runner_of
from kvist_connector.agent.peer_api import PeerApi
from kvist_connector.agent.selection import RequestError


async def test_not_ready_and_not_healthy_say_why():
    reasons = {"ready": "the arena is being reserved", "healthy": ""}
    status = Status(healthy=lambda: reasons["healthy"], ready=lambda: reasons["ready"])
    api = Api(status, lambda: b"", Access(None))
    async with TestClient(TestServer(api.application())) as client:
        response = await client.get("/readyz")
        assert response.status == 503
        assert (await response.json())["error"]["message"] == "the arena is being reserved"
        assert (await client.get("/healthz")).status == 200
        for method, path in (
            ("GET", "/v1/kvist/stats"),
            ("GET", "/v1/kvist/feed?reader=a"),
            ("POST", "/v1/kvist/lookup"),
        ):
            early = await client.request(method, path)
            assert early.status == 503
        reasons.update(ready="", healthy="task write-behind died")
        assert (await client.get("/readyz")).status == 200
        assert (await client.get("/healthz")).status == 503


async def test_errors_have_one_form():
    api = Api(Status(lambda: "", lambda: ""), lambda: b"", Access(None))
    async with TestClient(TestServer(api.application())) as client:
        for path, status in (("/nowhere", 404), ("/v1/kvist/clear", 405)):
            response = await client.get(path)
            assert response.status == status
            assert set((await response.json())["error"]) == {"message", "field"}


class Recorded:
    """Controls that note what they are asked."""

    def __init__(self):
        self.edits = self

    async def lookup(self, body):
        return {"hit_chunks": 0}

    async def clear(self, body):
        return {"chunks": 3}

    async def pin(self, body):
        raise RequestError("0 is not within 0 to 1 seconds", "seconds")

    def stats(self):
        return {}


async def test_a_read_token_reads_and_an_admin_token_changes():
    api = Api(Status(lambda: "", lambda: ""), lambda: b"", Access(lambda: "chief", lambda: "guest"))
    api.ready(Recorded(), None)
    async with TestClient(TestServer(api.application())) as client:

        async def status(method, path, token):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return (await client.request(method, path, json={}, headers=headers)).status

        for token, read, change in (
            ("chief", 200, 200),
            ("guest", 200, 403),
            ("nobody", 401, 401),
            ("", 401, 401),
        ):
            assert await status("GET", "/v1/kvist/stats", token) == read
            assert await status("POST", "/v1/kvist/lookup", token) == read
            assert await status("POST", "/v1/kvist/clear", token) == change
        assert await status("GET", "/healthz", "") == 200


async def test_each_change_leaves_one_line_of_audit_without_prompts(caplog):
    api = Api(Status(lambda: "", lambda: ""), lambda: b"", Access(None))
    api.ready(Recorded(), None)
    async with TestClient(TestServer(api.application())) as client:
        with caplog.at_level(logging.INFO, "kvist.audit"):
            await client.post("/v1/kvist/clear", json={"tokens": [4711] * 300})
            await client.post("/v1/kvist/clear", json={"all": True, "dry_run": True})
            await client.post("/v1/kvist/lookup", json={})
            assert (await client.post("/v1/kvist/pin", json={"seconds": 0})).status == 400
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "kvist.audit"]
    assert [line["action"] for line in lines] == ["clear", "pin"]
    assert (lines[0]["asked"], lines[0]["answer"]) == ({"tokens": "300 items"}, {"chunks": 3})
    assert lines[0]["remote"] == "127.0.0.1"
    assert lines[1]["answer"] == "0 is not within 0 to 1 seconds"
    assert "4711" not in caplog.text


async def test_a_line_of_audit_is_short_however_long_the_body_was(caplog):
    api = Api(Status(lambda: "", lambda: ""), lambda: b"", Access(None))
    api.ready(Recorded(), None)
    long = "x" * 100_000
    async with TestClient(TestServer(api.application())) as client:
        with caplog.at_level(logging.INFO, "kvist.audit"):
            for body in ({"tag": long}, {long: 1}, {"a": {long: 1}}, {str(n): 1 for n in range(10_000)}):
                await client.post("/v1/kvist/clear", json=body)
                await client.post("/v1/kvist/pin", json={"seconds": 0, **body})
    lines = [record.getMessage() for record in caplog.records if record.name == "kvist.audit"]
    assert len(lines) == 8
    assert max(map(len, lines)) < 4096


HEAD = b"GET /healthz HTTP/1.1\r\nhost: a\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD])
async def test_a_connection_that_asks_for_nothing_is_closed(sent):
    api = Api(Status(lambda: "", lambda: ""), lambda: b"", Access(None))
    runner = runner_of(api.application(), idle=0.01)
    await runner.setup()
    await TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
    writer.write(sent)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    await runner.cleanup()


@pytest.mark.parametrize("body", [b"[" * 5000, b'{"source": ' + b"[" * 5000, b"\xff", b""])
async def test_a_peer_that_asks_for_what_cannot_be_is_refused(body):
    async def take(_):
        raise AssertionError("nothing was asked for")

    api = PeerApi(None, Access(None), reads=1, deadline=60, take=take)
    async with TestClient(TestServer(api.application())) as client:
        assert (await client.post(names.PATH_PEER_TAKE, data=body)).status == 400
