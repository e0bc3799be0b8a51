"""The measuring client and the sources, where things do not go as they should."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvist_cli.demo import sources
from kvist_cli.demo.client import chat, connect
from kvist_cli.demo.errors import DemoError
from kvist_cli.demo.exactness import Answer, Check, prompts

MESSAGES = [{"role": "user", "content": "word " * 600}]


def sse(*lines: str) -> httpx.Client:
    text = "".join(f"data: {line}\n\n" for line in lines)
    return httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, text=text)))


def test_a_reply_holds_text_usage_and_the_routers_words(world: Any) -> None:
    with connect() as client:
        chat(client, f"{world.base}/router", "demo", MESSAGES, 8)
        reply = chat(client, f"{world.base}/router", "demo", MESSAGES, 8)
    assert reply.text == "So it is 1."
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (600, 4, 576)
    assert (reply.replica, reply.predicted_tokens) == ("replica-1", 576)
    assert len(reply.gaps) == 3
    assert 0 < reply.ttft <= reply.seconds


def test_without_headers_there_is_no_prediction() -> None:
    reply = chat(sse('{"choices": [{"delta": {"content": "a"}}]}', "[DONE]"), "http://x", "demo", MESSAGES, 8)
    assert (reply.predicted_tokens, reply.replica) == (None, "")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (('{"error": {"message": "out of memory"}}',), "out of memory"),
        (('{"choices": [{"delta": {"role": "assistant"}}]}', "[DONE]"), "no token arrived"),
    ],
)
def test_a_stream_that_fails_is_told_in_words(lines: tuple[str, ...], words: str) -> None:
    with pytest.raises(DemoError, match=words):
        chat(sse(*lines), "http://x", "demo", MESSAGES, 8)


def test_a_dead_router_is_told_in_words() -> None:
    with connect() as client, pytest.raises(DemoError, match="failed"):
        chat(client, "http://127.0.0.1:9", "demo", MESSAGES, 8)


def test_a_record_that_does_not_come_is_none(world: Any) -> None:
    with connect() as client:
        assert sources.outcome(client, f"{world.base}/admin", "unknown", seconds=0.0) is None


def test_chunks_that_do_not_reach_the_disk_are_told() -> None:
    pending = httpx.MockTransport(lambda request: httpx.Response(200, json={"pending_chunks": 3}))
    with httpx.Client(transport=pending) as client, pytest.raises(DemoError, match="3 chunks"):
        sources.flush(client, "http://agent")


def answer(tier: str, hit: int = 256, logprob: float = -0.5) -> Answer:
    return Answer("a", [1], {"top": [logprob]}, {tier: hit})


def check(**answers: Answer) -> Check:
    usual = {tier: answer(tier) for tier in ("gpu", "memory", "disk")}
    return Check(257, 256, {**usual, **answers})


def test_a_check_accepts_equal_answers_from_the_meant_tiers() -> None:
    assert check().problems == []


def test_a_check_refuses_a_last_bit_of_difference() -> None:
    assert "differs" in check(disk=answer("disk", logprob=-0.5000001)).problems[0]


def test_a_check_refuses_a_hit_from_another_tier_or_of_another_length() -> None:
    assert "256 from memory expected" in check(memory=answer("gpu")).problems[0]
    assert "256 from gpu expected" in check(gpu=answer("gpu", hit=224)).problems[0]


def test_prompts_end_within_one_block_after_a_chunk() -> None:
    cut = prompts(list(range(4000)))
    assert len(cut) >= 6
    assert all(0 < len(tokens) - hit <= 32 and hit % 256 == 0 for tokens, hit in cut)
    assert len({tokens[0] for tokens, _ in cut}) == len(cut)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(DemoError, match="2828 tokens"):
        prompts(list(range(2000)))
