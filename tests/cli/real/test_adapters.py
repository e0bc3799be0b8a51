"""A LoRA adapter beside the model: its name is a model's, and its KV is its own."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

MODEL, TUNED = "smol", "tuned"
ADAPTERS = [TUNED]
# One token is allowed, so that what is generated does not hang on how a batch was cut.
FIXED = {"model": TUNED, "temperature": 0, "max_tokens": 3, "allowed_token_ids": [28]}
USER = {"role": "user", "content": "What did the sea bring?"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Without log probabilities of prompts: with adapters they end vLLM 0.32 on CPUs.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**FIXED, "messages": [USER]}),
    (CHAT, {**FIXED, "messages": [USER], "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {**FIXED, "messages": [USER], "n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {**FIXED, "model": MODEL, "messages": [USER]}),
    (CHAT, {**FIXED, "model": "untuned", "messages": [USER]}),
    (COMPLETIONS, {**FIXED, "prompt": ["The sea", "The land"]}),
    (COMPLETIONS, {**FIXED, "prompt": [1, 2, 3], "stream": True}),
    ("/v1/responses", {"model": TUNED, "input": "x", "max_output_tokens": 1, "temperature": 0}),
    ("/tokenize", {"model": TUNED, "messages": [USER]}),
    ("/detokenize", {"model": TUNED, "tokens": [1, 2, 3]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
def test_an_adapters_requests_are_answered_as_by_the_engine(
    rig: Any, path: str, body: dict[str, Any]
) -> None:
    rig.mirrored()
    engine = next(iter(rig.urls.engines.values()))
    direct, routed = rig.asked(engine, "POST", path, body), rig.asked(rig.urls.router, "POST", path, body)
    if direct[0] == 404:  # the router knows who is served, and says it in its own words
        assert routed[:2] == direct[:2]
    else:
        assert routed == direct


def test_it_is_listed_beside_the_model(rig: Any) -> None:
    rig.mirrored()
    answer = rig.client.get(f"{rig.urls.router}/v1/models").json()
    assert [card["id"] for card in answer["data"]] == sorted([MODEL, TUNED])


def test_it_says_something_else_and_finds_nothing_of_the_models_own(rig: Any) -> None:
    rig.mirrored()
    said = {}
    for model in (MODEL, TUNED):
        answer = rig.chat("adapters", model=model, max_tokens=16)
        assert sum(rig.decision(answer)["actual"]["hit_tokens"].values()) == 0
        said[model] = rig.text(answer)
    assert said[MODEL] != said[TUNED]
    for _ in range(2):  # the other replica may have been the one
        again = rig.decision(rig.chat("adapters", model=TUNED, max_tokens=2))
    assert sum(again["actual"]["hit_tokens"].values()) > 0
    rig.at_rest()
