"""The whole path on two real engines: answers, errors, hits, and service after each kill."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvist_connector import names

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_openai_sdk_streams_and_does_not(rig: Any) -> None:
    client = openai.OpenAI(base_url=f"{rig.urls.router}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["smol"]
    messages = rig.messages("the sdk", 10)
    asked = {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**asked)
    pieces = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    streamed = list(pieces)
    assert whole.choices[0].message.content
    assert streamed[-1].usage is not None
    assert streamed[-1].usage.completion_tokens == 8
    plain = client.completions.create(model="smol", prompt="One, two, three,", max_tokens=4, temperature=0)
    assert plain.choices[0].text
    client.close()


def test_router_changes_nothing_of_an_answer(rig: Any) -> None:
    first = rig.chat("transparency")
    replica = first.headers[names.HEADER_REPLICA]
    rig.decision(first)
    routed = rig.chat("transparency")  # long enough that the warm replica is clearly the faster one
    direct = rig.chat("transparency", base=rig.urls.engines[replica])
    assert routed.headers[names.HEADER_REPLICA] == replica

    def body(response: httpx.Response) -> dict[str, Any]:
        found: dict[str, Any] = response.json()
        return {key: value for key, value in found.items() if key not in ("id", "created")}

    assert body(routed) == body(direct)


def test_second_turn_goes_where_the_first_was_and_is_predicted_to_the_token(rig: Any) -> None:
    first = rig.chat("prediction")
    rig.decision(first)
    second = rig.chat("prediction", max_tokens=4)
    record = rig.decision(second)
    assert second.headers[names.HEADER_REPLICA] == first.headers[names.HEADER_REPLICA]
    actual = sum(record["actual"]["hit_tokens"].values())
    assert actual >= 256
    assert int(second.headers[names.HEADER_PREDICTED_TOKENS]) == actual
    gpu = rig.stats(second.headers[names.HEADER_REPLICA])["gpu"]
    assert gpu["known"]
    assert gpu["keys"] > 0  # the engine's KV events arrive


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": "smol", "messages": [', 400),
        (b'{"model": "nobody", "messages": [{"role": "user", "content": "hi"}]}', 404),
        (b'{"model": "smol", "prompt": "' + b"word " * 9000 + b'"}', 400),
        (b'{"model": "smol", "model": "smol", "messages": []}', 400),
    ],
    ids=["not JSON", "unknown model", "over the context length", "key twice"],
)
def test_bad_requests_end_in_openai_form(rig: Any, body: bytes, status: int) -> None:
    path = "/v1/completions" if b"prompt" in body else "/v1/chat/completions"
    answer = rig.client.post(
        rig.urls.router + path, content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    rig.at_rest()


@pytest.mark.parametrize("stream", [True, False])
def test_client_gone_frees_everything(rig: Any, stream: bool) -> None:
    body = {
        "model": "smol",
        "messages": rig.messages(f"leaving {stream}", 5),
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": stream,
    }
    url = f"{rig.urls.router}/v1/chat/completions"
    if stream:
        with rig.client.stream("POST", url, json=body) as response:
            next(response.iter_raw())
    else:
        with pytest.raises(httpx.ReadTimeout):
            rig.client.post(url, json=body, timeout=3)
    rig.at_rest()


def test_chunks_on_disk_that_were_flipped_are_recomputed(rig: Any) -> None:
    cold = rig.chat("flipping")
    replica = cold.headers[names.HEADER_REPLICA]
    rig.decision(cold)
    before = rig.stats(replica)["tier_counters"]["disk"].get("corrupt", 0)
    rig.post(rig.urls.agents[replica] + names.PATH_FLUSH, {"deadline": 30})
    for path in _chunk_files(rig, replica):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)
    rig.post(rig.urls.agents[replica] + names.PATH_CLEAR, {"tier": "memory"})
    rig.forget_gpu(replica)
    again = rig.chat("flipping", base=rig.urls.engines[replica])
    assert rig.text(again) == rig.text(cold)  # both computed the whole prompt alone: equal to the bit
    assert rig.stats(replica)["tier_counters"]["disk"]["corrupt"] > before


def test_router_killed_comes_back_with_a_full_view(rig: Any) -> None:
    first = rig.chat("router's death")
    rig.decision(first)
    rig.cluster.kill("router")
    rig.cluster.wait_ready("router")
    rig.mirrored()
    second = rig.chat("router's death")
    assert second.headers[names.HEADER_REPLICA] == first.headers[names.HEADER_REPLICA]
    assert int(second.headers[names.HEADER_PREDICTED_TOKENS]) >= 256


def test_agent_killed_under_a_request_costs_nobody_an_answer(rig: Any) -> None:
    first = rig.chat("agent's death")
    rig.decision(first)
    replica = first.headers[names.HEADER_REPLICA]
    engine = rig.urls.engines[replica]
    rig.forget_gpu(replica)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.extend(rig.chat("agent's death", base=engine, max_tokens=40) for _ in range(3))
    )
    asking.start()
    agent = replica.replace("replica", "agent")
    rig.cluster.kill(agent)
    asking.join(120)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    rig.cluster.wait_ready(agent)
    rig.mirrored()
    assert rig.stats(replica)["tiers"]["memory"]["chunks"] > 0  # the arena survived its agent
    rig.forget_gpu(replica)
    record = rig.decision(rig.chat("agent's death"))
    assert record["actual"]["hit_tokens"].get("memory", 0) >= 256


def test_engine_killed_mid_stream_ends_the_stream_and_its_cache_survives(rig: Any) -> None:
    first = rig.chat("engine's death")
    rig.decision(first)
    replica = first.headers[names.HEADER_REPLICA]
    engine = replica.replace("replica", "engine")
    body = {
        "model": "smol",
        "messages": rig.messages("engine's death"),
        "max_tokens": 500,
        "ignore_eos": True,
        "stream": True,
    }
    with rig.client.stream("POST", f"{rig.urls.router}/v1/chat/completions", json=body) as response:
        stream = response.iter_text()
        seen = [next(stream)]
        rig.cluster.kill(engine)
        with pytest.raises(httpx.RemoteProtocolError):  # a truncated answer is never taken for a whole one
            seen.extend(stream)
    assert "[DONE]" not in "".join(seen)
    meanwhile = rig.chat("while it is away", sentences=3)
    assert rig.text(meanwhile)
    assert meanwhile.headers[names.HEADER_REPLICA] != replica
    rig.cluster.wait_ready(engine)
    rig.mirrored()
    record = rig.decision(rig.chat("engine's death"))
    assert record["actual"]["hit_tokens"].get("memory", 0) >= 256
    rig.at_rest()


def _chunk_files(rig: Any, replica: str) -> list[Path]:
    found = [path for path in (rig.cluster.run_dir / replica / "disk").rglob("*.kvist") if path.is_file()]
    assert found, "nothing was written to disk"
    return found
