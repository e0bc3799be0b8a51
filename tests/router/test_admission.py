"""Rates of tenants and the queue in front of the replicas, through the router."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from kvist_connector.errors import ConfigError
from kvist_connector.settings import validate
from kvist_router.access.settings import AdmissionSettings, ShareSettings
from kvist_router.mind.admission.gate import Gate
from kvist_router.mind.admission.metrics import AdmissionMetrics
from kvist_router.relay.spent import answer_tokens
from kvist_router.settings import RouterSettings
from kvist_router.testing.engine import FakeEngine

URL = "/v1/chat/completions"


def chat(text: str = "x", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
def as_tenants(tmp_path):
    """Settings of tenants by name, whose API key is their name."""

    def made(**tenants: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "secret").write_text("0123456789abcdef")
        listed = []
        for name, fields in tenants.items():
            digest = hashlib.sha256(name.encode()).hexdigest()
            (tmp_path / name).write_text(f"sha256:{digest}\n")
            listed.append({"name": name, "keys_file": str(tmp_path / name), **fields})
        return {"tenants": listed, "tenant": {"secret_file": str(tmp_path / "secret")}}

    return made


def by(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}"}


async def metric(http, running, line: str) -> float:
    async with http.get(running.admin_url + "/metrics") as answer:
        for text in (await answer.text()).splitlines():
            if text.startswith(line + " "):
                return float(text.rpartition(" ")[2])
    return 0.0


async def test_requests_above_a_tenants_rate_are_429_and_others_go_on(router, http, as_tenants) -> None:
    async with FakeEngine() as engine:
        running = await router(
            replicas=[{"url": engine.url}], **as_tenants(few={"requests_per_minute": 2}, many={})
        )
        found = []
        for tenant in ("few", "few", "few", "many", "many", "many"):
            async with http.post(running.url + URL, json=chat(), headers=by(tenant)) as answer:
                found.append(answer.status)
                if answer.status == 429:
                    assert 1 <= int(answer.headers["retry-after"]) <= 30
                    error = (await answer.json())["error"]
                    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert found == [200, 200, 429, 200, 200, 200]
        assert len(engine.received) == 5
        refused = 'kvist_router_limited_total{reason="requests",tenant="few"}'
        assert await metric(http, running, refused) == 1
        assert await metric(http, running, 'kvist_router_tenant_requests_total{tenant="many"}') == 3


async def test_tokens_of_prompts_and_answers_count(router, http, as_tenants) -> None:
    async def answered(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 1000}})

    async with FakeEngine() as engine:
        engine.answer = answered
        engine.tokens = lambda question: list(range(10))
        running = await router(replicas=[{"url": engine.url}], **as_tenants(t={"tokens_per_minute": 500}))
        async with http.post(running.url + URL, json=chat(), headers=by("t")) as answer:
            assert answer.status == 200
            await answer.read()
        async with http.post(running.url + URL, json=chat(), headers=by("t")) as answer:
            assert answer.status == 429
            assert 50 <= int(answer.headers["retry-after"]) <= 62  # (1,010 - 500) / 500 minutes
            assert "tokens" in (await answer.json())["error"]["message"]
        tokens = "kvist_router_tenant_tokens_total"
        assert await metric(http, running, tokens + '{kind="prompt",tenant="t"}') == 10
        assert await metric(http, running, tokens + '{kind="answer",tenant="t"}') == 1000


async def test_tenants_of_a_gateways_header_have_rates_too_and_one_label(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], tenant={"others": {"requests_per_minute": 1}})
        found = []
        for tenant in ("a", "b", "a", "c"):
            async with http.post(running.url + URL, json=chat(), headers={"x-tenant": tenant}) as answer:
                found.append(answer.status)
        assert found == [200, 200, 429, 200]
        assert await metric(http, running, 'kvist_router_tenant_requests_total{tenant="other"}') == 3


class Sent:
    """Requests that were sent one after the other, and when they reach the engine."""

    def __init__(self, http, running, until) -> None:
        self.http, self.running, self.until = http, running, until
        self.tasks: list[asyncio.Task[int]] = []

    async def send(self, name: str, tenant: str, waiting: int | None = None) -> None:
        async def ask() -> int:
            body = chat(name)
            async with self.http.post(self.running.url + URL, json=body, headers=by(tenant)) as answer:
                await answer.read()
                return int(answer.status)

        self.tasks.append(asyncio.create_task(ask()))
        if waiting is not None:
            await self.until(lambda: len(self.running.mind.gate) == waiting)


def names(engine: FakeEngine) -> list[str]:
    return [json.loads(item.body)["messages"][0]["content"] for item in engine.received]


async def test_waiting_tenants_take_turns_and_priorities_go_first(router, http, until, as_tenants) -> None:
    async with FakeEngine() as engine:
        engine.tokens = lambda question: list(range(5000))
        engine.first_byte.clear()
        running = await router(
            replicas=[{"url": engine.url}],
            admission={"per_replica": 1},
            **as_tenants(greedy={}, modest={}, urgent={"priority": -1}),
        )
        sent = Sent(http, running, until)
        await sent.send("first", "greedy")
        await engine.wait_received(1)
        for number in range(4):
            await sent.send(f"g{number}", "greedy", number + 1)
        await sent.send("m", "modest", 5)
        await sent.send("u", "urgent", 6)
        assert await metric(http, running, "kvist_router_queued_requests") == 6
        engine.first_byte.set()
        assert await asyncio.gather(*sent.tasks) == [200] * 7
        order = names(engine)
        assert order[:2] == ["first", "u"]
        assert order.index("m") <= 4
        assert [name for name in order if name[0] == "g"] == ["g0", "g1", "g2", "g3"]
        assert len(running.mind.gate) == 0


async def test_a_full_queue_refuses_the_tenant_that_fills_it(router, http, until, as_tenants) -> None:
    async with FakeEngine() as engine:
        engine.first_byte.clear()
        running = await router(
            replicas=[{"url": engine.url}],
            admission={"per_replica": 1, "waiting": 2},
            **as_tenants(greedy={}, modest={}),
        )
        sent = Sent(http, running, until)
        await sent.send("first", "greedy")
        await engine.wait_received(1)
        await sent.send("g0", "greedy", 1)
        await sent.send("g1", "greedy", 2)
        await sent.send("m", "modest")
        assert await sent.tasks[2] == 503
        async with http.post(running.url + URL, json=chat(), headers=by("greedy")) as answer:
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert (await answer.json())["error"]["code"] == "overloaded"
        engine.first_byte.set()
        assert [await task for task in sent.tasks] == [200, 200, 503, 200]
        assert await metric(http, running, 'kvist_router_limited_total{reason="full",tenant="greedy"}') == 2


async def test_who_waits_too_long_is_refused_and_who_leaves_makes_room(
    router, http, until, as_tenants
) -> None:
    async with FakeEngine() as engine:
        engine.first_byte.clear()
        running = await router(
            replicas=[{"url": engine.url}], admission={"per_replica": 1, "seconds": 0.2}, **as_tenants(t={})
        )
        sent = Sent(http, running, until)
        await sent.send("first", "t")
        await engine.wait_received(1)
        await sent.send("late", "t")
        assert await sent.tasks[1] == 503
        await until(lambda: len(running.mind.gate) == 0)
        sent.tasks[0].cancel()
        await until(lambda: len(running.mind.in_flight) == 0)
        engine.first_byte.set()
        await sent.send("next", "t")
        assert await sent.tasks[2] == 200


async def test_a_client_that_leaves_the_queue_takes_no_turn(router, http, until, as_tenants) -> None:
    async with FakeEngine() as engine:
        engine.first_byte.clear()
        running = await router(
            replicas=[{"url": engine.url}], admission={"per_replica": 1}, **as_tenants(t={})
        )
        sent = Sent(http, running, until)
        await sent.send("first", "t")
        await engine.wait_received(1)
        await sent.send("gone", "t", 1)
        await sent.send("second", "t", 2)
        sent.tasks[1].cancel()
        await until(lambda: len(running.mind.gate) == 1)
        engine.first_byte.set()
        assert [await sent.tasks[0], await sent.tasks[2]] == [200, 200]
        assert names(engine) == ["first", "second"]


async def test_a_retry_has_had_its_turn(router, http, as_tenants) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500)

    async with FakeEngine() as bad, FakeEngine() as good:
        bad.answer = broken
        running = await router(
            replicas=[{"name": "a", "url": bad.url}, {"name": "b", "url": good.url}],
            policy="round-robin",
            admission={"per_replica": 1, "seconds": 1},
            **as_tenants(t={"requests_per_minute": 2}),
        )
        for _ in range(2):
            async with http.post(running.url + URL, json=chat(), headers=by("t")) as answer:
                assert answer.status == 200
        assert len(running.mind.in_flight) == 0


async def test_requests_are_shed_while_a_first_token_would_take_too_long(router, http) -> None:
    async with FakeEngine(longest=10**6) as engine:
        engine.tokens = lambda question: list(range(100_000))
        running = await router(replicas=[{"url": engine.url}], admission={"ttft_seconds": 0.001})
        async with http.post(running.url + URL, json=chat()) as answer:
            assert answer.status == 503
            assert "a first token would take" in (await answer.json())["error"]["message"]
            assert "retry-after" in answer.headers
        assert engine.received == []


@pytest.mark.parametrize(
    ("tail", "pieces", "tokens"),
    [
        ((b"", b'{"usage": {"prompt_tokens": 3, "completion_tokens": 7}}'), 0, 7),
        ((b"", b'{"usage":{"completion_tokens":7,"completion_tokens_details":{"x":9}}}'), 0, 7),
        ((b'data: {"usage":{"completion_tokens":12}}\n\n', b"data: [DONE]\n\n"), 40, 12),
        ((b"data: 1\n\n", b"data: [DONE]\n\n"), 40, 40),
        ((b"", b'{"completion_tokens": "x"}'), 0, 0),
        ((b"", b'"completion_tokens": 9' + b" " * 10_000), 0, 0),
        ((b"", b""), 0, 0),
    ],
)
def test_tokens_of_an_answer_are_read_from_its_end(tail, pieces, tokens) -> None:
    assert answer_tokens(tail, pieces) == tokens


def test_tenants_are_named_once() -> None:
    values = {"replicas": [{"url": "http://x"}], "tenants": [{"name": "a"}, {"name": "a"}]}
    with pytest.raises(ConfigError, match="name 'a' is given twice"):
        validate(RouterSettings, values)


async def test_clients_that_leave_in_crowds_leave_nothing_behind(router, until) -> None:
    crowd = 300
    async with FakeEngine() as engine, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        engine.first_byte.clear()
        running = await router(replicas=[{"name": "r", "url": engine.url}], admission={"per_replica": 8})
        mind = running.mind

        async def ask() -> int:
            async with http.post(running.url + URL, json=chat()) as answer:
                return int(answer.status)

        tasks = [asyncio.create_task(ask()) for _ in range(crowd)]
        await until(lambda: len(mind.in_flight) == 8 and len(mind.gate) == crowd - 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: len(mind.in_flight) == 0 and len(mind.gate) == 0)
        replica = mind.replicas["r"]
        assert (replica.outstanding_tokens, replica.outstanding_requests, len(replica.pending)) == (0, 0, 0)
        engine.first_byte.set()
        assert await asyncio.gather(*(ask() for _ in range(8))) == [200] * 8
        assert replica.breaker.state == "closed"


async def test_a_turn_that_its_owner_does_not_take_is_the_next_ones(until) -> None:
    metrics = AdmissionMetrics(CollectorRegistry())
    settings = AdmissionSettings(per_replica=1)
    gate = Gate(settings, (), ShareSettings(), lambda each: each, metrics, asyncio.get_running_loop().time)
    assert await gate.enter("first", "", 1) is False
    second, third = (asyncio.create_task(gate.enter(name, "", 1)) for name in ("second", "third"))
    await until(lambda: len(gate) == 2)
    gate.leave("first")
    second.cancel()  # it was called, and has not gone on
    assert await asyncio.wait_for(third, 60) is True
    gate.leave("third")
    assert await gate.enter("fourth", "", 1) is False


async def test_a_fault_between_turn_and_dispatch_keeps_no_place(router, http, monkeypatch) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], admission={"per_replica": 1, "seconds": 1})
        with monkeypatch.context() as patch:
            patch.setattr(running.mind.records, "add", lambda record: 1 / 0)
            async with http.post(running.url + URL, json=chat()) as answer:
                assert answer.status == 500
        assert len(running.mind.in_flight) == 0
        async with http.post(running.url + URL, json=chat()) as answer:
            assert answer.status == 200
