"""An engine is killed amid a stream and another goes on: the client sees the answer it would have seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvist_connector import names

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

# In bfloat16 a prompt computed at once and one decoded token by token may differ in their last bit.
ENGINE = {"dtype": "float32", "kvCacheMemory": "256Mi"}
ROUTER = {"limits": {"continuations": 1}}
PATHS = ("/v1/chat/completions", "/v1/completions")
TOKENS, BROKEN_AFTER = 200, 20


def body(path: str) -> dict[str, Any]:
    """Greedy, and long enough that it is killed in the middle; the text has characters of several bytes."""
    asked = "Write a long story about a lighthouse, 灯台, and its keeper Åsa. 🎏"
    prompt = {"messages": [{"role": "user", "content": asked}]} if "chat" in path else {"prompt": asked}
    more = {"stream": True, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return {"model": "smol", **prompt, **more, "stream_options": {"include_usage": True}}


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """As they come; the test fails on an error event or an end without [DONE]."""
    for line in answer.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event
    pytest.fail("the stream ended without [DONE]")


def text(found: list[dict[str, Any]]) -> str:
    choices = [event["choices"][0] for event in found if event["choices"]]
    return "".join(item.get("text") or item.get("delta", {}).get("content") or "" for item in choices)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_goes_on_where_the_killed_engine_stopped(rig: Any, path: str) -> None:
    for number in range(2):  # the one that was killed before takes its time
        rig.cluster.wait_ready(f"engine-{number}")
    rig.mirrored()
    with rig.client.stream("POST", rig.urls.router + path, json=body(path)) as answer:
        unbroken = list(events(answer))
    assert unbroken[-1]["usage"]["completion_tokens"] == TOKENS
    found = []
    with rig.client.stream("POST", rig.urls.router + path, json=body(path)) as answer:
        replica = answer.headers[names.HEADER_REPLICA]
        for event in events(answer):
            found.append(event)
            if len(found) == BROKEN_AFTER:
                rig.cluster.kill(f"engine-{replica.rpartition('-')[2]}")
    assert text(found) == text(unbroken)
    assert len({event["id"] for event in found}) == 1
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found[-1]["usage"][count] == unbroken[-1]["usage"][count]
    finishes = [event["choices"][0].get("finish_reason") for event in found if event["choices"]]
    assert [item for item in finishes if item] == ["length"]
    metrics = rig.client.get(rig.urls.router_admin + names.PATH_METRICS).text
    assert 'kvist_router_continuations_total{outcome="continued"}' in metrics
    rig.idle()
