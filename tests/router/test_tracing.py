"""OpenTelemetry spans of requests, received by a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import gzip
import re
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from kvist_connector.errors import ConfigError
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.server import LocalServer

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

URL = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "my secret prompt"}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(LocalServer):
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list = []
        self.texts: list[bytes] = []

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/traces", self._traces)
        return app

    async def _traces(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.texts.append(body)
        message = trace_service.ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as found:
        yield found


def attributes(span) -> dict[str, object]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


async def test_a_clients_trace_goes_on_to_the_engine(router, http, until, collector) -> None:
    tracing = {"endpoint": collector.url + "/v1/traces"}
    async with FakeEngine() as engine:
        running = await router(replicas=[{"name": "r", "url": engine.url}], tracing=tracing)
        headers = {"traceparent": PARENT}
        async with http.post(running.url + URL, json=CHAT, headers=headers) as answer:
            await answer.read()
        async with http.get(running.url + "/healthz"):
            pass
        async with http.post(running.url + URL, json={}) as refused:
            assert refused.status == 400
        await until(lambda: len(collector.spans) == 2)
        span, other = collector.spans
        assert span.trace_id.hex() == PARENT.split("-")[1]
        assert span.parent_span_id.hex() == PARENT.split("-")[2]
        told = engine.received[0].headers["traceparent"].split("-")
        assert told[1:3] == [span.trace_id.hex(), span.span_id.hex()]
        found = attributes(span)
        assert found["kvist.replica"] == "r"
        assert found["kvist.request_id"] == answer.headers["x-kvist-request-id"]
        assert found["http.response.status_code"] == 200
        assert [event.name for event in span.events] == ["first byte"]
        assert other.trace_id != span.trace_id
        assert not other.parent_span_id
        assert {item.name for item in collector.spans} == {"POST /v1/chat/completions"}
        assert all(b"secret" not in text for text in collector.texts)


async def test_requests_do_not_wait_for_a_collector_that_is_not_there(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(
            replicas=[{"url": engine.url}], tracing={"endpoint": "http://127.0.0.1:9/v1/traces", "ratio": 0}
        )
        async with http.post(running.url + URL, json=CHAT) as answer:
            assert answer.status == 200


async def test_without_a_collector_the_clients_headers_pass_as_they_are(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}])
        async with http.post(running.url + URL, json=CHAT, headers={"traceparent": PARENT}) as answer:
            await answer.read()
        assert engine.received[0].headers["traceparent"] == PARENT


async def test_without_the_library_it_says_what_to_install(router, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kvist_router.tracing", None)
    with pytest.raises(ConfigError, match=r"install kvist\[tracing\]"):
        await router(ready=False, replicas=[{"url": "http://x"}], tracing={"endpoint": "http://x/v1/traces"})


def test_the_lock_of_routers_has_what_traces_need() -> None:
    checkout = Path(__file__).parents[2]
    extras = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {re.split("[<>=]", item)[0] for item in extras["tracing"]}
    locked = re.findall(
        r"^([a-z0-9-]+)==", (checkout / "requirements" / "router.txt").read_text(), re.MULTILINE
    )
    assert needed <= set(locked)
