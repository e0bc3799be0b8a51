"""Events as vLLM's own classes write them: what the router takes out is all that it had asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvist_router.relay.continuation import continuable
from kvist_router.relay.story import Story

pytestmark = pytest.mark.timeout(900)  # importing the engine takes minutes on a busy machine
PROMPT, IDS, TEXTS = [1, 2, 3], [[11], [12, 13], [14]], ["Hel", "lo", " wörld"]
CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}
COMPLETION = {"model": "m", "stream": True, "prompt": "a"}


def written(events: list[Any]) -> bytes:
    lines = [f"data: {event.model_dump_json(exclude_unset=True)}\n\n".encode() for event in events]
    return b"".join(lines) + b"data: [DONE]\n\n"


def chat(asked: bool) -> bytes:
    """As serve_chat's stream generator fills the classes."""
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    delta_of = protocol.DeltaMessage

    def chunk(**fields: Any) -> Any:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        return protocol.ChatCompletionStreamResponse(**head, **fields)

    choice = protocol.ChatCompletionResponseStreamChoice
    first = choice(index=0, delta=delta_of(role="assistant", content=""), logprobs=None, finish_reason=None)
    events = [chunk(choices=[first], prompt_token_ids=PROMPT if asked else None, prompt_text=None)]
    for ids, text in zip(IDS, TEXTS, strict=True):
        told = {"token_ids": ids if asked else None}
        last = {"finish_reason": "stop", "stop_reason": None} if ids is IDS[-1] else {"finish_reason": None}
        delta = delta_of(content=text)
        events.append(chunk(choices=[choice(index=0, delta=delta, logprobs=None, **last, **told)]))
    return written(events)


def completion(asked: bool) -> bytes:
    """As the completions' stream generator fills them."""
    protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    events = []
    for ids, text in zip(IDS, TEXTS, strict=True):
        choice = protocol.CompletionResponseStreamChoice(
            index=0,
            text=text,
            logprobs=None,
            finish_reason="length" if ids is IDS[-1] else None,
            stop_reason=None,
            prompt_token_ids=PROMPT if asked and ids is IDS[0] else None,
            token_ids=ids if asked else None,
        )
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
        events.append(protocol.CompletionStreamResponse(**head, choices=[choice]))
    return written(events)


@pytest.mark.parametrize(("made", "body"), [(chat, CHAT), (completion, COMPLETION)])
def test_an_answer_with_token_ids_becomes_the_one_without(made: Any, body: dict[str, Any]) -> None:
    path = "chat" if made is chat else "completions"
    asked = continuable(json.dumps(body).encode(), path)
    assert asked is not None
    assert json.loads(asked.body) == {**body, "return_token_ids": True}
    story = Story(asked)
    assert story.feed(made(True)) == made(False)
    assert story.done
    assert story.tokens == 4


@pytest.mark.parametrize(("made", "body"), [(chat, CHAT), (completion, COMPLETION)])
def test_its_rest_is_asked_for_after_the_tokens_told(made: Any, body: dict[str, Any]) -> None:
    asked = continuable(
        json.dumps({**body, "max_tokens": 9}).encode(), "chat" if made is chat else "completions"
    )
    assert asked is not None
    story = Story(asked)
    told = made(True)
    story.feed(told[: told.rindex(b"data: {")])  # all but the event that ends it
    rest = json.loads(story.resume(100) or b"{}")
    protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    request = protocol.CompletionRequest(**rest)
    assert request.prompt == [*PROMPT, 11, 12, 13]
    assert (request.max_tokens, request.stream, request.return_token_ids) == (6, True, True)
