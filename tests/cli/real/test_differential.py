"""Through the router everything is as it is straight at the engine, but for ids, times and own headers."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

MODEL = "smol"
# One token is allowed, so that what is generated does not hang on how a batch was cut.
FIXED = {"model": MODEL, "temperature": 0, "max_tokens": 3, "allowed_token_ids": [28]}
USER = {"role": "user", "content": "What did the sea bring?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# What a model of text alone refuses: pictures, sounds and films, inside the body and elsewhere.
DOT = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)
MEDIA: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": DOT}},
    {"type": "image_url", "image_url": {"url": DOT, "detail": "low"}, "uuid": "a"},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/picture.png"}},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,UklGRg=="}},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + "A" * 20 * 2**20},
    },  # in a file here
    {"type": "image_url"},
    {"type": "file", "file": {"file_id": "x"}},
]


def shown(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]


REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", CHAT, {**FIXED, "messages": [USER]}),
    ("POST", CHAT, {**FIXED, "messages": [USER], "stream": True, "stream_options": {"include_usage": True}}),
    ("POST", CHAT, {**FIXED, "messages": [USER], "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("POST", CHAT, {**FIXED, "messages": [USER], "tools": [TOOL], "tool_choice": "none"}),
    ("POST", CHAT, {**FIXED, "messages": [USER], "tools": [TOOL]}),
    ("POST", CHAT, {**FIXED, "messages": [USER], "stop": [","], "seed": 5, "ignore_eos": True}),
    ("POST", CHAT, {**FIXED, "messages": [USER], "chat_template_kwargs": {"x": 1}, "user": "u"}),
    ("POST", CHAT, {**FIXED, "messages": [USER], "max_tokens": -1}),
    ("POST", CHAT, {**FIXED, "messages": [USER], "temperature": 9}),
    ("POST", CHAT, {**FIXED, "messages": [USER], "reasoning_effort": "very"}),
    ("POST", CHAT, {**FIXED, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("POST", CHAT, {**FIXED, "messages": [{"content": "x"}]}),
    ("POST", CHAT, {**FIXED, "messages": [USER, {"role": "assistant", "content": "A"}],
                    "continue_final_message": True, "add_generation_prompt": False}),
    ("POST", COMPLETIONS, {**FIXED, "prompt": "The sea"}),
    ("POST", COMPLETIONS, {**FIXED, "prompt": ["The sea", "The land"], "echo": True, "logprobs": 1}),
    ("POST", COMPLETIONS, {**FIXED, "prompt": [1, 2, 3], "n": 2}),
    ("POST", COMPLETIONS, {**FIXED, "prompt": [[1, 2], [3]], "stream": True}),
    ("POST", COMPLETIONS, {**FIXED, "prompt": [-1]}),
    ("POST", COMPLETIONS, {**FIXED, "prompt": ""}),
    ("POST", COMPLETIONS, {**FIXED, "prompt": "x", "structured_outputs": {"choice": [","]}}),
    ("POST", "/v1/responses", {"model": MODEL, "input": "The sea", "max_output_tokens": 1, "temperature": 0}),
    ("POST", "/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": "resp_unknown"}),
    ("GET", "/v1/responses/resp_unknown", None),
    ("POST", "/v1/embeddings", {"model": MODEL, "input": "x"}),
    *(("POST", CHAT, {**FIXED, "messages": shown(part)}) for part in MEDIA),
    ("POST", CHAT, {**FIXED, "messages": shown(MEDIA[0]), "stream": True}),
    ("POST", "/v1/responses", {"model": MODEL, "max_output_tokens": 1, "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": DOT, "detail": "auto"}]}]}),
    ("POST", "/tokenize", {"model": MODEL, "prompt": "The sea <|im_end|>"}),
    ("POST", "/tokenize", {"model": MODEL, "messages": [USER]}),
    ("POST", "/detokenize", {"model": MODEL, "tokens": [1, 2, 3]}),
]  # fmt: skip
# The router refuses or answers these in words of its own, with the same status.
OWN_WORDS = frozenset({"/v1/responses/resp_unknown"})


@pytest.mark.parametrize("asked", REQUESTS, ids=lambda asked: asked[1])
def test_the_router_answers_as_the_engine_does(rig: Any, asked: tuple[str, str, Any]) -> None:
    rig.mirrored()
    engine = next(iter(rig.urls.engines.values()))
    direct, routed = rig.asked(engine, *asked), rig.asked(rig.urls.router, *asked)
    if asked[1] in OWN_WORDS and direct[0] >= 400:
        assert routed[0] == direct[0]
    else:
        assert routed == direct


# What the SDK is asked to do, by its own methods; `extra_body` has what only vLLM knows.
ONLY = {"allowed_token_ids": [28], "ignore_eos": True}
ASKED = {"model": MODEL, "temperature": 0, "max_tokens": 3, "extra_body": ONLY}
SCHEMA = {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SDK: list[tuple[str, dict[str, Any]]] = [
    ("chat.completions.create", {**ASKED, "messages": [USER]}),
    ("chat.completions.create", {**ASKED, "messages": [USER], "stream": True}),
    ("chat.completions.create", {**ASKED, "messages": [USER], "stream": True,
                                 "stream_options": {"include_usage": True}}),
    ("chat.completions.create", {**ASKED, "messages": [USER], "n": 2, "logprobs": True, "top_logprobs": 1}),
    ("chat.completions.create", {**ASKED, "messages": [USER], "tools": [TOOL], "tool_choice": "none"}),
    ("chat.completions.create", {"model": MODEL, "messages": [USER], "max_tokens": 3, "temperature": 0,
                                 "response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
    ("chat.completions.create", {**ASKED, "messages": [{"role": "system", "content": "å 漢 🎏"}, USER]}),
    ("chat.completions.create", {**ASKED, "model": "nobody", "messages": [USER]}),
    ("chat.completions.create", {**ASKED, "messages": [USER], "temperature": 9}),
    ("completions.create", {**ASKED, "prompt": "The sea", "echo": True}),
    ("completions.create", {**ASKED, "prompt": ["The sea", "The land"], "logprobs": 1}),
    ("completions.create", {**ASKED, "prompt": [1, 2, 3], "stream": True}),
    ("completions.create", {**ASKED, "prompt": [[1, 2], [3]], "n": 2}),
    ("responses.create", {"model": MODEL, "input": "The sea", "max_output_tokens": 1, "temperature": 0}),
    ("embeddings.create", {"model": MODEL, "input": "x"}),
    ("chat.completions.create", {**ASKED, "messages": shown(MEDIA[0])}),
]  # fmt: skip


def through_sdk(rig: Any, base: str, method: str, asked: dict[str, Any]) -> Any:
    """What the SDK makes of an answer, or of its refusal."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client:
        call: Any = client
        for name in method.split("."):
            call = getattr(call, name)
        try:
            found = call(**asked)
        except openai.APIStatusError as error:
            return type(error).__name__, error.status_code
        if asked.get("stream"):
            return [rig.plain(event.model_dump()) for event in found]
        return rig.plain(found.model_dump())


@pytest.mark.parametrize(("method", "asked"), SDK, ids=[method for method, _ in SDK])
def test_the_sdk_makes_the_same_of_both_answers(rig: Any, method: str, asked: dict[str, Any]) -> None:
    rig.mirrored()
    engine = next(iter(rig.urls.engines.values()))
    assert through_sdk(rig, rig.urls.router, method, asked) == through_sdk(rig, engine, method, asked)


def test_a_strict_client_gets_what_it_expects_and_admin_paths_are_not_there(rig: Any) -> None:
    openai = pytest.importorskip("openai")
    rig.mirrored()
    with openai.OpenAI(base_url=rig.urls.router + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        answer = client.chat.completions.create(
            model=MODEL, messages=[USER], max_tokens=2, extra_body={"allowed_token_ids": [28]}
        )
        assert answer.usage.completion_tokens == 2
        pieces = list(client.completions.create(model=MODEL, prompt="x", max_tokens=2, stream=True))
        assert pieces[-1].choices[0].finish_reason == "length"
    for path in ("/reset_prefix_cache", "/collective_rpc", "/v1/load_lora_adapter", "/sleep"):
        assert rig.client.post(rig.urls.router + path, json={}).status_code == 404


def test_a_body_over_the_limit_is_refused_before_it_reaches_an_engine(rig: Any) -> None:
    rig.mirrored()
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 129 * 2**20}}
    answer = rig.client.post(rig.urls.router + CHAT, json={**FIXED, "messages": shown(picture)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")
    rig.at_rest()
