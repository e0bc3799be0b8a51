"""Local tokens are the engine's: compared with transformers, which vLLM renders and tokenizes with."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvist_connector.keys import pack_tokens
from kvist_router.errors import NotExact
from kvist_router.tokens.tokenizer import ModelTokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<reponame>", "<|im_", "im_end|>"]
WORDS = [*"\t<", "hello", " world", "\n", "\n\n", "  ", "'s", "123", "é", "e\u0301", "\u200b", "|>"]
WORDS += ["日本語", "🙂", "👩\u200d👩\u200d👧"]
text = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(SPECIAL + WORDS), max_size=30).map("".join),
    st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=200),
)
content = st.one_of(text, st.lists(text.map(lambda item: {"type": "text", "text": item}), max_size=3))
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": content}
)
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizers(smollm2: Path) -> tuple[Any, ModelTokenizer]:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(smollm2)), ModelTokenizer(smollm2, 2**20, 2000)


def as_vllm(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """vLLM joins text parts by newlines for templates that want strings, without empty parts."""
    joined = []
    for item in messages:
        parts = item["content"]
        if not isinstance(parts, str):
            parts = "\n".join(part["text"] for part in parts if part["text"])
        joined.append({"role": item["role"], "content": parts})
    return joined


def encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@many
@given(messages=st.lists(message, min_size=1, max_size=6), generate=st.booleans())
def test_chat_tokens_are_those_of_transformers(tokenizers, messages, generate: bool) -> None:
    reference, ours = tokenizers
    if not encodable(messages):
        return
    expected = reference.apply_chat_template(
        as_vllm(messages), tokenize=True, add_generation_prompt=generate, return_dict=False
    )
    fields = {"messages": messages, "add_generation_prompt": generate}
    assert b"".join(asyncio.run(ours.chat(fields))) == pack_tokens(expected)


@many
@given(prompt=text)
def test_completion_tokens_are_those_of_transformers(tokenizers, prompt: str) -> None:
    reference, ours = tokenizers
    if encodable(prompt):
        assert b"".join(asyncio.run(ours.text(prompt))) == pack_tokens(reference(prompt)["input_ids"])


def test_long_new_text_is_encoded_beside_the_loop_and_kept(tokenizers) -> None:
    reference, ours = tokenizers
    prompt = "many words of text, " * 2000
    for _ in range(2):
        assert b"".join(asyncio.run(ours.text(prompt))) == pack_tokens(reference(prompt)["input_ids"])


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function"}]},
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f", "defer_loading": True}}]},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"continue_final_message": True},  # beside add_generation_prompt, which is the default
        {"documents": [{"text": 1}]},
        {"reasoning_effort": "very"},
        {"mm_processor_kwargs": {"x": 1}},
        {"messages": [{"role": "critic", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "name": 1}]},
        {"messages": [{"role": "user", "content": "x", "other": "y"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "reasoning": "y"}]},
    ],
)
def test_what_only_the_engine_knows_is_not_rendered_here(tokenizers, change: dict[str, Any]) -> None:
    _, ours = tokenizers
    with pytest.raises(NotExact):
        asyncio.run(ours.chat({"messages": [{"role": "user", "content": "x"}], **change}))
