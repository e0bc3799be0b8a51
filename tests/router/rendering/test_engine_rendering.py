"""Chat requests of every kind give the engine's tokens, or the router says that it does not know them.

The engine's own code renders each request too: validation, message forms, template, tokenizer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from kvist_connector.keys import pack_tokens
from kvist_router.errors import NotExact
from kvist_router.mind import verify
from kvist_router.tokens.responses import as_chat
from kvist_router.tokens.tokenizer import ModelTokenizer
from kvist_router.tokens.unusual import unusual

pytestmark = pytest.mark.timeout(900)  # importing the engine takes minutes on a busy machine

# Mistral's tokenizer takes long to convert, and DeepSeek has two.
FAMILIES = [
    *("smollm2", "qwen3", "deepseek-v3", "llama3"),
    *(pytest.param(family, marks=pytest.mark.full) for family in ("deepseek-r1", "mistral")),
]
PIECES = [
    *("hello", " world", "\n", "\n\n", "  ", "\t", "'s", "123", "4567", "<", "|>", "[", "]", "{", '"', "\\"),
    *(
        "é",
        "e\u0301",
        "\u200b",
        "日本語",
        "🙂",
        "👩\u200d👩\u200d👧",
        "\u2026",
        "\u0130",
        "ß",
        "\u0000",
        "\ufeff",
    ),
    *("<|im_start|>", "<|im_end|>", "<|im_", "im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *("<|eot_id|>", "<|begin_of_text|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "▁"),
    *(
        "<think>",
        "</think>",
        "<tool_response>",
        "</tool_response>",
        "<tool_call>",
        "CONTINUE_FINAL_MESSAGE_TAG ",
    ),
]
pieces = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
text = st.one_of(pieces, st.text(st.characters(codec="utf-8"), max_size=40))
part = st.one_of(text, text.map(lambda item: {"type": "text", "text": item}))
content = st.one_of(text, st.lists(part, max_size=3))
name = st.sampled_from(["f", "get_weather", "日本"])
scalar = st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), text)
value = st.one_of(scalar, st.lists(scalar, max_size=2), st.dictionaries(text, scalar, max_size=2))
arguments = st.one_of(
    st.dictionaries(st.sampled_from("abc"), value, max_size=2).map(json.dumps),
    st.sampled_from(["", "{}", "[]", "1", "no JSON", '{"a": 1, "a": 2}', '{"é": "\\u00e9"}']),
)
call = st.builds(
    lambda name, arguments, extra: {
        "id": "call12345", "type": "function", "function": {"name": name, "arguments": arguments}, **extra
    },
    name, arguments, st.sampled_from([{}, {}, {"index": 0}]),
)  # fmt: skip
# What clients send back: an answer as it came, with members that say nothing.
silent = st.fixed_dictionaries(
    {},
    optional={
        "refusal": st.none(), "audio": st.none(), "function_call": st.none(), "annotations": st.just([]),
        "tool_calls": st.sampled_from([None, []]),
    },
)  # fmt: skip
reasons = st.fixed_dictionaries({}, optional={"reasoning": text, "reasoning_content": text})
named = st.fixed_dictionaries({}, optional={"name": name})
system = st.builds(
    lambda role, content, named: {"role": role, "content": content, **named},
    st.sampled_from(["system", "system", "developer"]), content, named,
)  # fmt: skip
user = st.builds(lambda content, named: {"role": "user", "content": content, **named}, content, named)
answer = st.builds(
    lambda content, silent, reasons: {"role": "assistant", "content": content, **silent, **reasons},
    content, silent, reasons,
)  # fmt: skip
calling = st.builds(
    lambda content, calls, reasons, results: [
        {"role": "assistant", **content, "tool_calls": calls, **reasons},
        *[{"role": "tool", "tool_call_id": "call12345", "content": result} for result in results],
    ],
    st.sampled_from([{}, {"content": None}, {"content": ""}, {"content": "so"}]),
    st.lists(call, min_size=1, max_size=2), st.sampled_from([{}, {}, {"reasoning": "why"}]),
    st.lists(content, min_size=1, max_size=2),
)  # fmt: skip
turn = st.one_of(
    st.tuples(user, answer).map(list), st.tuples(user, calling).map(lambda pair: [pair[0], *pair[1]])
)
conversation = st.builds(
    lambda system, turns, last: [*system, *[message for turn in turns for message in turn], *last],
    st.lists(system, max_size=2), st.lists(turn, max_size=2), st.lists(user, max_size=1),
).filter(bool)  # fmt: skip
tool = st.builds(
    lambda name, described, more: {"type": "function", "function": {"name": name, **described}, **more},
    name,
    st.fixed_dictionaries({}, optional={
        "description": st.one_of(st.none(), text), "strict": st.sampled_from([None, True, False]),
        "parameters": st.dictionaries(st.sampled_from(["type", "properties", "é"]), value, max_size=2),
        "other": st.just(1),
    }),
    st.sampled_from([{}, {}, {"x": 1}]),
)  # fmt: skip
options = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.lists(tool, min_size=1, max_size=2),
        "tool_choice": st.sampled_from(["none", "auto"]),
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
        "add_special_tokens": st.booleans(),
        "reasoning_effort": st.sampled_from([None, "none", "low", "high"]),
        "documents": st.lists(st.fixed_dictionaries({"title": text, "text": text}), max_size=2),
        "chat_template_kwargs": st.dictionaries(
            st.sampled_from(["enable_thinking", "thinking", "date_string", "bos_token", "unused", "tools"]),
            st.one_of(st.none(), st.booleans(), text, st.just("auto")), max_size=2,
        ),
    },
)  # fmt: skip
said = st.builds(
    lambda role, content, more: {"role": role, "content": content, **more},
    st.sampled_from(["system", "user", "user", "developer", "assistant"]),
    st.one_of(text, text.map(lambda item: [{"type": "input_text", "text": item}])),
    st.sampled_from([{}, {}, {"type": "message"}]),
)  # fmt: skip
responses = st.fixed_dictionaries(
    {"input": st.one_of(text, st.lists(said, min_size=1, max_size=3))},
    optional={
        "instructions": text, "reasoning": st.sampled_from([None, {}, {"effort": "low"}, {"effort": "none"}]),
        "chat_template_kwargs": st.just({"enable_thinking": False}), "truncation": st.just("disabled"),
    },
)  # fmt: skip
EVERYTHING = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
)


FEWER = settings(EVERYTHING, max_examples=15)


def ours(tokens: Any) -> bytes | str:
    """Packed tokens, or why the engine has to be asked."""
    try:
        return b"".join(asyncio.run(tokens))
    except NotExact as reason:
        return str(reason)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, model_folder: Callable[[str], Path], frontend: Any) -> Any:
    """The engine's code and ours, of one family."""
    engine = frontend(request.param)
    return engine, ModelTokenizer(model_folder(request.param), 2**22, 10**9)


CALL = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NULL_CONTENT = [
    {"role": "user", "content": ""},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "why"},
    {"role": "tool", "tool_call_id": "call12345", "content": ""},
]


@EVERYTHING
@given(messages=conversation, options=options)
@example(messages=NULL_CONTENT, options={})
def test_every_chat_request_gives_the_engines_tokens(pair, messages, options: dict[str, Any]) -> None:
    engine, tokenizer = pair
    fields = {"messages": messages, **options}
    expected = engine.chat(fields)
    found = ours(tokenizer.chat(fields))
    event(found if isinstance(found, str) else "rendered here")
    assert expected is None or isinstance(found, str) or found == pack_tokens(expected), fields


@FEWER
@given(messages=conversation, options=options)
def test_ordinary_requests_are_rendered_here(pair, messages, options: dict[str, Any]) -> None:
    engine, tokenizer = pair
    for name in ("chat_template_kwargs", "continue_final_message", "add_special_tokens"):
        options.pop(name, None)
    fields = {"messages": messages, **options}
    found = ours(tokenizer.chat(fields))
    if isinstance(found, str):
        assert engine.chat(fields) is None or "'reasoning" in str(messages), found


@FEWER
@given(prompt=text, special=st.booleans())
def test_every_completion_gives_the_engines_tokens(pair, prompt: str, special: bool) -> None:
    engine, tokenizer = pair
    expected = engine.completion({"prompt": prompt, "add_special_tokens": special})
    found = ours(tokenizer.text(prompt) if special else tokenizer.plain(prompt))
    assert expected is None or isinstance(found, str) or found == pack_tokens(expected)


@FEWER
@given(given=responses)
def test_every_response_request_gives_the_engines_tokens(pair, given: dict[str, Any]) -> None:
    engine, tokenizer = pair
    expected = engine.response(given)
    try:
        found = ours(tokenizer.chat(as_chat(given)))
    except NotExact:
        return
    assert expected is None or isinstance(found, str) or found == pack_tokens(expected)


@pytest.mark.full
def test_a_tokenizer_that_the_engine_builds_anew_is_found_out_before_it_is_relied_on(
    model_folder: Callable[[str], Path], frontend: Any
) -> None:
    """Its class has another pre-tokenizer than tokenizer.json, which no file of the folder says."""
    engine, tokenizer = frontend("minimax"), ModelTokenizer(model_folder("minimax"), 2**20, 10**9)
    chats = [fields for fields in verify.cases(20) if "messages" in fields]
    plain = [fields for fields in chats if not unusual(fields)]
    assert any(ours(tokenizer.chat(fields)) != pack_tokens(engine.chat(fields)) for fields in plain)


@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
def test_the_cases_of_a_verification_agree_where_nothing_differs(
    model_folder: Callable[[str], Path], frontend: Any, family: str
) -> None:
    engine, tokenizer = frontend(family), ModelTokenizer(model_folder(family), 2**20, 10**9)
    for fields in verify.cases(60):
        if "messages" in fields:
            assert ours(tokenizer.chat(fields)) == pack_tokens(engine.chat(fields)), fields


def test_a_special_token_that_only_the_configuration_names_is_the_engines_to_add(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_folder("smollm2") / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<new>"}))
    tokenizer = ModelTokenizer(tmp_path, 2**20, 10**9)
    assert ours(tokenizer.text("a")) == "special tokens"
    assert "'<new>'" in tokenizer.chat_problem
