"""The relay between a client and engines: bytes, headers, errors, retries, cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvist_router.testing.engine import FakeEngine

CHAT = "/v1/chat/completions"


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def replicas(*engines: FakeEngine) -> list[dict[str, str]]:
    return [{"name": f"r{number}", "url": engine.url} for number, engine in enumerate(engines)]


async def error_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    error = (await answer.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def test_body_reaches_the_engine_byte_for_byte_and_so_does_the_answer(router, http) -> None:
    body = b'{ "model":"m",\n "temperature": 1.0e0, "big": 123456789012345678901234567890,' + (
        b' "messages":[{"role":"user","content":"\\u00e9\xc3\xa9"}],"x":[1, 2.50] }'
    )
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + CHAT + "?a=b%20c", data=body) as answer:
            assert answer.status == 200
            assert await answer.read() == b'{"choices": [{"message": {"content": "ok"}}]}'
            assert answer.headers["x-engine"] == "yes"
            assert answer.headers["x-kvist-replica"] == "r0"
            assert answer.headers["x-kvist-predicted-tokens"] == "0"
        received = engine.received[0]
        assert received.body == body
        assert received.query == "a=b%20c"
        assert received.headers["x-request-id"] == answer.headers["x-kvist-request-id"]


async def test_credentials_and_inbound_kvist_headers_are_dropped(router, http) -> None:
    sent = {
        "Authorization": "Bearer secret",
        "X-Kvist-Replica": "r9",
        "X-Request-Id": "mine",
        "X-Other": "kept",
    }
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + CHAT, json=chat(), headers=sent) as answer:
            assert answer.status == 200
        headers = engine.received[0].headers
        assert "authorization" not in headers
        assert "x-kvist-replica" not in headers
        assert headers["x-request-id"] != "mine"
        assert headers["x-other"] == "kept"


async def test_pieces_of_a_stream_pass_as_they_come(router, http) -> None:
    async with FakeEngine() as engine:
        engine.rest.clear()
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + CHAT, json=chat(stream=True)) as answer:
            assert await answer.content.readany() == engine.pieces[0]
            engine.rest.set()
            assert await answer.read() == b"".join(engine.pieces[1:])
            assert answer.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b"\xff{}", "invalid_json", None),
        (b"[" * 100_000, "invalid_json", None),
        (b'{"messages":[{"role":"user","content":"a"}],"x":NaN}', "invalid_json", None),
        (b'{"model":"m","model":"m","messages":[{}]}', "duplicate_key", "model"),
        (b'{"model":"m","messages":[{"role":"user","role":"user"}]}', "duplicate_key", "role"),
        (b'{"model":"m"}', None, "messages"),
        (b'{"model":"m","messages":[]}', None, "messages"),
        (b'{"model":3,"messages":[{}]}', None, "model"),
        (b'{"model":"m","messages":[{}],"kv_transfer_params":{}}', None, "kv_transfer_params"),
        (b'{"model":"m","messages":[{}],"kv\\u005ftransfer_params":{"a":1}}', None, "kv_transfer_params"),
        (b'{"model":"m","messages":[{}],"ec_transfer_params":{"peer":"x"}}', None, "ec_transfer_params"),
        (b'{"model":"m","messages":[{}],"vllm_xargs":{"kv_transfer_params":"x"}}', None, "vllm_xargs"),
        (b'{"model":"m","messages":[{}],"vllm_xargs":{"ec_transfer_params":[1]}}', None, "vllm_xargs"),
        (b'{"model":"m","messages":[{}],"kvist":null}', None, "kvist"),
        (
            b'{"model":"m","messages":[{}],"cache_salt":"a","cache\\u005fsalt":"b"}',
            "duplicate_key",
            "cache_salt",
        ),
        (b'{"model":"m","messages":[{}],"vllm_xargs":{"a":1,"a":2}}', "duplicate_key", "a"),
        (b'{"model":"m","messages":[{}],"kvist":{"tags":"x"}}', None, "kvist.tags"),
        (b'{"model":"m","messages":[{}],"kvist":{"other":1}}', None, "kvist"),
        (rb'{"model":"m","messages":[{}],"cache_salt":"\ud800"}', None, "cache_salt"),
        (rb'{"model":"m","messages":[{}],"cache_salt":"a\udfff\ud800"}', None, "cache_salt"),
        (rb'{"model":"m","messages":[{}],"kvist":{"tags":["\ud800"]}}', None, "kvist.tags"),
    ],
)
async def test_bad_bodies_are_refused_in_openai_form(router, http, body, code, param) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + CHAT, data=body) as answer:
            assert answer.status == 400
            error = await error_of(answer)
            assert (error["code"], error["param"]) == (code, param)
        assert engine.received == []


HALF = rb'"\ud800"'  # of a surrogate pair, which no UTF-8 text can hold


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", b'{"messages":[{"role":"user","content":%s}]}'),
        ("chat/completions", b'{"messages":[{"role":%s,"content":"a"}],"user":"a"}'),
        ("chat/completions", b'{"messages":[{"role":"user","content":"a"}],"chat_template":%s}'),
        ("chat/completions", b'{"messages":[{"role":"user","content":"a"}],"tools":[%s],"stop":"a"}'),
        ("chat/completions", b'{"messages":[{"role":"user","content":"a"}],%s:1}'),
        ("chat/completions", b'{"messages":[{"role":"user","content":[{"type":"text","text":%s}]}]}'),
        ("completions", b'{"prompt":%s}'),
        ("completions", b'{"prompt":["a",%s]}'),
        ("responses", b'{"input":%s}'),
        ("responses", b'{"input":"a","previous_response_id":%s}'),
        ("responses", b'{"input":"a","instructions":%s}'),
        ("embeddings", b'{"input":[%s]}'),
    ],
)
async def test_half_of_a_surrogate_pair_is_the_engines_to_judge(router, http, path: str, body: bytes) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        sent = body % HALF
        async with http.post(f"{running.url}/v1/{path}", data=sent) as answer:
            assert answer.status == 200, await answer.text()
        assert engine.received[-1].body == sent


async def test_roles_that_are_no_texts_are_the_engines_to_judge(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        for role in ([], {}, [["a"]], 5, None, ""):
            for path, name in (("chat/completions", "messages"), ("responses", "input")):
                sent = json.dumps({name: [{"role": role, "content": "a"}]}).encode()
                async with http.post(f"{running.url}/v1/{path}", data=sent) as answer:
                    assert answer.status == 200, await answer.text()
                assert engine.received[-1].body == sent


@pytest.mark.parametrize("field", ["chat_template_kwargs", "reasoning_effort", "documents", "tools"])
async def test_arguments_of_a_template_that_are_none_are_the_engines_to_judge(router, http, field) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        for value in ("a", 5, True, [1], [["a", 1]], [{}], 1e300):
            sent = json.dumps({"messages": [{"role": "user", "content": "a"}], field: value}).encode()
            async with http.post(running.url + CHAT, data=sent) as answer:
                assert answer.status == 200, await answer.text()
            assert engine.received[-1].body == sent


async def test_unknown_model_is_404_and_names_the_served_ones(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + CHAT, json={**chat(), "model": "gpt"}) as answer:
            assert answer.status == 404
            error = await error_of(answer)
            assert error["code"] == "model_not_found"
            assert "served here: m" in error["message"]


async def test_prompt_over_the_context_length_is_400(router, http) -> None:
    async with FakeEngine(longest=100) as engine:
        engine.tokens = lambda question: list(range(101))
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + CHAT, json=chat()) as answer:
            assert answer.status == 400
            assert (await error_of(answer))["code"] == "context_length_exceeded"


async def test_body_over_the_limit_is_413_with_and_without_a_length(router, http) -> None:
    async def endless() -> Any:
        for _ in range(64):
            yield b"x" * 1024

    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine), limits={"body_bytes": 2048})
        for data in (b"x" * 4096, endless()):
            async with http.post(running.url + CHAT, data=data) as answer:
                assert answer.status == 413
                assert (await error_of(answer))["code"] == "body_too_long"


async def test_other_paths_are_404_and_methods_405(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        for path in ("/v1/rerank", "/health", "/", "/docs", "/v1/chat/completions/"):
            async with http.post(running.url + path, json={}) as answer:
                assert answer.status in (404, 405)
                await error_of(answer)
        async with http.get(running.url + CHAT) as answer:
            assert answer.status == 405
            await error_of(answer)


async def test_no_replica_is_503_with_retry_after(router, http) -> None:
    running = await router(ready=False, replicas=[{"url": "http://127.0.0.1:9"}])
    async with http.post(running.url + CHAT, json=chat()) as answer:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) > 0
        assert (await error_of(answer))["code"] == "no_replica"
    async with http.get(running.url + "/readyz") as answer:
        assert answer.status == 503
    async with http.get(running.url + "/healthz") as answer:
        assert answer.status == 200


async def test_a_replica_that_refuses_connections_is_replaced_before_the_first_byte(router, http) -> None:
    async with FakeEngine() as dead, FakeEngine() as alive:
        running = await router(
            replicas=replicas(dead, alive), policy="round-robin", health={"interval_seconds": 3600}
        )
        await dead.stop()
        async with http.post(running.url + CHAT, json=chat()) as answer:
            assert answer.status == 200
            assert answer.headers["x-kvist-replica"] == "r1"
        record = running.mind.records.get(answer.headers["x-kvist-request-id"])
        assert record is not None
        assert record.attempts == ["r0", "r1"]
        assert not running.mind.replicas["r0"].healthy  # passive mark
        assert len(running.mind.in_flight) == 0


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def headers_then_reset(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    return await reset(request)


async def status_500(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="engine says no")


@pytest.mark.parametrize("fault", [reset, headers_then_reset, status_500])
async def test_faults_before_the_first_byte_are_retried_once_elsewhere(router, http, fault) -> None:
    async with FakeEngine() as broken, FakeEngine() as whole:
        broken.answer = fault
        running = await router(replicas=replicas(broken, whole), policy="round-robin")
        async with http.post(running.url + CHAT, json=chat()) as answer:
            assert answer.status == 200
            assert answer.headers["x-kvist-replica"] == "r1"
        assert len(broken.received) == 1
        assert len(running.mind.in_flight) == 0


@pytest.mark.parametrize(("fault", "status"), [(reset, 502), (status_500, 500)])
async def test_faults_with_nowhere_else_to_go_reach_the_client(router, http, fault, status) -> None:
    async with FakeEngine() as engine:
        engine.answer = fault
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + CHAT, json=chat()) as answer:
            assert answer.status == status
            if fault is status_500:
                assert await answer.text() == "engine says no"
            else:
                assert (await error_of(answer))["code"] == "upstream_failed"
        assert len(running.mind.in_flight) == 0


async def test_client_errors_of_the_engine_pass_unchanged(router, http) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "engine's own words"}}, status=400)

    async with FakeEngine() as engine, FakeEngine() as other:
        engine.answer = other.answer = refuse
        running = await router(replicas=replicas(engine, other))
        async with http.post(running.url + CHAT, json=chat()) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"] == "engine's own words"
        assert len(engine.received) + len(other.received) == 1


async def test_an_engine_that_does_not_answer_is_504(router, http) -> None:
    async with FakeEngine() as engine:
        engine.first_byte.clear()
        running = await router(replicas=replicas(engine), limits={"first_byte_seconds": 0.2})
        async with http.post(running.url + CHAT, json=chat(stream=True)) as answer:
            assert answer.status == 504
            assert (await error_of(answer))["code"] == "upstream_timeout"
        await asyncio.wait_for(engine.received[0].ended.wait(), 60)
        assert engine.received[0].cancelled


async def test_an_answer_that_stops_moving_is_cut_and_cancelled_upstream(router, http) -> None:
    async with FakeEngine() as engine:
        engine.rest.clear()
        running = await router(replicas=replicas(engine), limits={"idle_seconds": 0.2})
        with pytest.raises(aiohttp.ClientPayloadError):
            async with http.post(running.url + CHAT, json=chat(stream=True)) as answer:
                await answer.read()
        await asyncio.wait_for(engine.received[0].ended.wait(), 60)
        assert engine.received[0].cancelled


async def test_an_engine_that_breaks_off_cuts_the_answer(router, http, until) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        return await reset(request)

    async with FakeEngine() as engine, FakeEngine() as other:
        engine.answer = other.answer = half
        running = await router(replicas=replicas(engine, other))
        with pytest.raises(aiohttp.ClientPayloadError):
            async with http.post(running.url + CHAT, json=chat(stream=True)) as answer:
                await answer.read()
        assert len(engine.received) + len(other.received) == 1
        await until(lambda: len(running.mind.in_flight) == 0)


@pytest.mark.parametrize("events", [True, False])
async def test_a_stream_that_breaks_off_ends_with_an_error_event_and_truncated(router, http, events) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        kind = "text/event-stream" if events else "application/json"
        response = web.StreamResponse(headers={"content-type": kind})
        await response.prepare(request)
        await response.write(b'data: {"n": 1}\n\ndata: {"n"')
        return await reset(request)

    async with FakeEngine() as engine:
        engine.answer = half
        running = await router(replicas=replicas(engine))
        came = b""
        async with http.post(running.url + CHAT, json=chat(stream=True)) as answer:

            async def read() -> None:
                nonlocal came
                while not answer.content.at_eof():
                    came += await answer.content.readany()

            with pytest.raises(aiohttp.ClientPayloadError):  # truncated in both cases
                await read()
        sent = b'data: {"n": 1}\n\ndata: {"n"'
        if not events:
            assert came == sent
            return
        assert came.startswith(sent + b"\n\ndata: {")
        error = json.loads(came.split(b"data: ")[-1])["error"]
        assert error["code"] == "upstream_failed"
        assert len(running.mind.in_flight) == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_the_engine(router, http, until, stream: bool) -> None:
    async with FakeEngine() as engine:
        engine.first_byte.clear()
        running = await router(replicas=replicas(engine))
        request = asyncio.create_task(http.post(running.url + CHAT, json=chat(stream=stream)))
        received = await engine.wait_received(1)
        request.cancel()
        await asyncio.wait_for(received.ended.wait(), 60)
        assert received.cancelled
        await until(lambda: len(running.mind.in_flight) == 0)
        replica = running.mind.replicas["r0"]
        assert (replica.outstanding_tokens, replica.outstanding_requests, len(replica.pending)) == (0, 0, 0)
        assert running.mind.records.latest(1)[0].outcome == "cancelled"


async def test_a_client_that_leaves_in_mid_stream_cancels_the_engine(router, http, until) -> None:
    async with FakeEngine() as engine:
        engine.rest.clear()
        running = await router(replicas=replicas(engine))
        answer = await http.post(running.url + CHAT, json=chat(stream=True))
        await answer.content.readany()
        answer.close()
        await asyncio.wait_for(engine.received[0].ended.wait(), 60)
        assert engine.received[0].cancelled
        await until(lambda: len(running.mind.in_flight) == 0)


async def test_tags_move_into_kv_transfer_params_and_nothing_else_changes(router, http) -> None:
    rest = b'"model":"m" ,"t": 1.0e0, "messages":[{"role":"user","content":"}\\""}]'
    body = b'{"kvist": {"tags": ["a","b"]}, ' + rest + b"}"
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + CHAT, data=body) as answer:
            assert answer.status == 200
        sent = engine.received[0].body
        assert json.loads(sent)["kv_transfer_params"] == {"tags": ["a", "b"]}
        assert "kvist" not in json.loads(sent)
        assert rest in sent


async def test_with_a_cluster_secret_the_salt_is_the_tenants(router, http, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123")
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine), tenant={"secret_file": str(secret)})
        for tenant in ("a", "a", "b"):
            headers = {"x-tenant": tenant}
            async with http.post(
                running.url + CHAT, json=chat(cache_salt="forged"), headers=headers
            ) as answer:
                assert answer.status == 200
        salts = [json.loads(received.body)["cache_salt"] for received in engine.received]
        assert salts[0] == salts[1] != salts[2]
        assert "forged" not in salts


async def test_a_fault_of_the_router_itself_is_a_500_in_openai_form(router, http, monkeypatch) -> None:
    async def fault(*_: Any) -> None:
        raise RuntimeError("a bug")

    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        monkeypatch.setattr(running.mind, "decide", fault)
        async with http.post(running.url + CHAT, json=chat()) as answer:
            assert answer.status == 500
            error = await error_of(answer)
        assert error["code"] == "internal_error"
        assert "a bug" not in error["message"]


async def test_models_are_those_of_the_engines(router, http) -> None:
    async with FakeEngine("a") as first, FakeEngine("b") as second:
        running = await router(replicas=replicas(first, second))
        async with http.get(running.url + "/v1/models") as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == ["a", "b"]
        for model, name in (("a", "r0"), ("b", "r1")):
            async with http.post(running.url + CHAT, json={**chat(), "model": model}) as answer:
                assert answer.headers["x-kvist-replica"] == name


async def test_metrics_are_on_both_ports(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + CHAT, json=chat(stream=True)) as answer:
            await answer.read()
        for url in (running.url, running.admin_url):
            async with http.get(url + "/metrics") as answer:
                text = await answer.text()
                assert 'kvist_router_requests_total{outcome="ended"} 1.0' in text
                assert 'kvist_router_ttft_seconds_count{cache="cold"} 1.0' in text


async def test_an_engine_comes_back_by_itself(router, http, until: Callable[..., Any]) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        await engine.stop()
        async with http.post(running.url + CHAT, json=chat()) as answer:
            assert answer.status in (502, 503)
        await until(lambda: not running.mind.replicas["r0"].healthy)
        await engine.start()
        await until(lambda: running.mind.replicas["r0"].healthy)
        async with http.post(running.url + CHAT, json=chat()) as answer:
            assert answer.status == 200
