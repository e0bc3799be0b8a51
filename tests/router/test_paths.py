"""Which paths reach an engine, and that what they carry reaches it as it was sent."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvist_router.mind.interface import Metadata, Report
from kvist_router.relay.paths import PATHS, route
from kvist_router.testing.engine import FakeEngine

# What vLLM has that would let a client steer, stop or read out an engine.
ADMIN = (
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/reset_mm_cache", "/sleep",
    "/reset_encoder_cache", "/collective_rpc", "/wake_up", "/pause", "/resume", "/start_profile",
    "/stop_profile", "/server_info", "/update_weights", "/abort_requests", "/scale_elastic_ep",
    "/invocations", "/inference/v1/generate", "/shutdown", "/docs", "/openapi.json", "/load",
    "/version", "/ping", "/v1/responses/render",
)  # fmt: skip
TRICKS = (
    "/v1/../sleep", "/v1/responses/../../sleep", "/v1/responses/resp_a%2F..%2Fsleep", "//sleep",
    "/v1/responses/",
    "/v1/responses/resp_a/b", "/v1/responses/resp_a/cancel/x", "/V1/completions", "/v1/completions/",
    "/v1/responses/resp_a\n", "/tokenize/x", "/v1/responses/resp_" + "a" * 129,
)  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "what is this"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
            ]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "n": 3, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": -100}, "seed": 2**63 - 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False},
        "vllm_xargs": {"a": 1.50}, "structured_outputs": {"choice": ["a"]},
        "unheard_of": [None, {"é": "\u2028"}],
    },
    "/v1/completions": {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 5, "prompt_logprobs": 1},
    "/v1/responses": {
        "input": [{"type": "function_call_output", "call_id": "c", "output": "1"}], "store": True,
    },
    "/v1/embeddings": {"input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 8},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip


def replicas(*engines: FakeEngine) -> list[dict[str, str]]:
    return [{"name": f"r{number}", "url": engine.url} for number, engine in enumerate(engines)]


@pytest.mark.parametrize("path", [*ADMIN, *TRICKS])
def test_admin_paths_and_disguises_are_not_routed(path: str) -> None:
    assert route(path) is None


def test_of_all_paths_of_an_installed_engine_only_the_listed_ones_are_routed() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    found = set()
    for file in (Path(spec.origin).parent / "entrypoints").rglob("*.py"):
        found |= set(re.findall(r'\.(?:get|post|put|delete|api_route)\(\s*"(/[^"]*)"', file.read_text()))
    assert "/reset_prefix_cache" in found
    routed = {path for path in found if route(path.replace("{response_id}", "resp_1")) is not None}
    assert routed <= {*PATHS, "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"}


async def test_an_unlisted_path_does_not_reach_the_engine(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        for path in ADMIN:
            for method in ("GET", "POST"):
                async with http.request(method, running.url + path, json={"prompt": "x"}) as answer:
                    assert answer.status == 404, path
        assert engine.received == []


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_field_reaches_the_engine_byte_for_byte(router, http, path: str, stream: bool) -> None:
    body = json.dumps({"model": "lora", **BODIES[path], "stream": stream}, indent=1).encode()
    async with FakeEngine("lora") as engine:
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + path + "?x=1", data=body) as answer:
            assert answer.status == 200
            expected = b"".join(engine.pieces) if stream else b'{"choices": [{"message": {"content": "ok"}}]}'
            assert await answer.read() == expected
        received = engine.received[0]
        assert (received.path, received.query, received.body) == (path, "x=1", body)
        assert len(running.mind.in_flight) == 0


async def test_tokenize_is_passed_to_an_engine_and_counts_as_no_load(router, http) -> None:
    async with FakeEngine() as engine:
        engine.tokens = lambda question: [1, 2]
        running = await router(replicas=replicas(engine))
        async with http.post(running.url + "/tokenize", json={"model": "m", "prompt": "x" * 4000}) as answer:
            assert (await answer.json())["tokens"] == [1, 2]
        record = running.mind.records.latest(1)[0]
        assert (record.tokens_from, record.prompt_tokens) == ("none", 0)
        assert engine.tokenized == 1


async def test_tokenize_and_detokenize_take_post_and_a_stored_response_get(router, http) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        for path in ("/tokenize", "/v1/embeddings", "/v1/responses/resp_1/cancel"):
            async with http.get(running.url + path) as answer:
                assert (answer.status, answer.headers["allow"]) == (405, "POST")
        async with http.delete(running.url + "/v1/responses/resp_1") as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "GET")


async def test_a_stored_response_is_found_on_its_replica_from_any_router(router, http) -> None:
    async with FakeEngine() as first, FakeEngine() as second, FakeEngine() as third:
        second.stored.add("resp_1")
        for _ in range(2):  # another router knows no more than the first did
            running = await router(replicas=replicas(first, second, third))
            async with http.get(running.url + "/v1/responses/resp_1") as answer:
                assert (answer.status, answer.headers["x-kvist-replica"]) == (200, "r1")
                assert (await answer.json())["id"] == "resp_1"
            asked = len(first.probed)
            async with http.post(running.url + "/v1/responses/resp_1/cancel") as answer:
                assert (await answer.json())["path"] == "/v1/responses/resp_1/cancel"
            assert len(first.probed) == asked  # it is remembered


async def test_a_response_goes_on_where_the_one_before_is_stored(router, http) -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        second.stored.add("resp_1")
        running = await router(replicas=replicas(first, second), policy="round-robin")
        for _ in range(3):
            body = {"model": "m", "input": "and then", "previous_response_id": "resp_1"}
            async with http.post(running.url + "/v1/responses", json=body) as answer:
                assert answer.headers["x-kvist-replica"] == "r1"
        assert first.received == []


async def test_a_response_that_nobody_has_is_404_and_going_on_from_it_is_the_engines_to_refuse(
    router, http
) -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        running = await router(replicas=replicas(first, second))
        async with http.get(running.url + "/v1/responses/resp_9") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "response_not_found"
        body = {"model": "m", "input": "x", "previous_response_id": "resp_9"}
        async with http.post(running.url + "/v1/responses", json=body) as answer:
            assert answer.status == 200
        assert len(first.received) + len(second.received) == 1


async def test_a_replica_that_does_not_answer_does_not_hold_up_the_search(router, http) -> None:
    async with FakeEngine() as dead, FakeEngine() as alive:
        alive.stored.add("resp_1")
        running = await router(replicas=replicas(dead, alive), health={"interval_seconds": 3600})
        await dead.stop()
        async with http.get(running.url + "/v1/responses/resp_1") as answer:
            assert answer.headers["x-kvist-replica"] == "r1"


async def test_the_tenants_salt_goes_into_responses_and_embeddings(router, http, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123")
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine), tenant={"secret_file": str(secret)})
        for path in ("/v1/responses", "/v1/embeddings"):
            body = {"model": "m", "input": "x", "cache_salt": "forged"}
            async with http.post(running.url + path, json=body) as answer:
                assert answer.status == 200
        salts = {json.loads(received.body)["cache_salt"] for received in engine.received}
        assert len(salts) == 1
        assert salts != {"forged"}


async def _tokens(running: Any, path: Any, **fields: Any) -> int:
    decision = await running.mind.decide(json.dumps({"model": "m", **fields}).encode(), Metadata(path))
    return int(decision.prompt_tokens)


async def test_pictures_are_not_counted_by_their_bytes(router) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=replicas(engine))
        url = {"url": "data:image/png;base64," + "A" * 400_000}
        parts = [{"type": "text", "text": "x" * 400}, {"type": "image_url", "image_url": url}]
        messages = [{"role": "user", "content": parts}]
        assert 1100 <= await _tokens(running, "chat", messages=messages) < 1110
        assert engine.tokenized == 0  # nor is an engine made to look at them


async def test_lists_of_prompts_cost_the_sum_of_them(router) -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        running = await router(replicas=replicas(first, second))
        # One replica has the first prompt of the list, the other one has the longer two.
        prompts = [[7] * 600, [8] * 1200, [9] * 1200]
        for held, name in ((prompts[:1], "r0"), (prompts[1:], "r1")):
            for prompt in held:
                running.mind.replicas["r0"].healthy = name == "r0"
                running.mind.replicas["r1"].healthy = name == "r1"
                body = json.dumps({"model": "m", "prompt": prompt}).encode()
                decision = await running.mind.decide(body, Metadata("completions"))
                await running.mind.report(decision.id, Report("first_byte"))
                await running.mind.report(decision.id, Report("ended"))
        running.mind.replicas["r0"].healthy = running.mind.replicas["r1"].healthy = True
        body = json.dumps({"model": "m", "prompt": prompts}).encode()
        decision = await running.mind.decide(body, Metadata("completions"))
        assert (decision.replica, decision.prompt_tokens) == ("r1", 3000)
        assert decision.predicted_tokens == 2 * 1024
