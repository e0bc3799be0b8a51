"""The fast ways from a body to tokens give what the careful ways give, or step aside."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_router.errors import NotExact, Refused
from kvist_router.tokens.request import parse
from kvist_router.tokens.skeleton import Skeletons
from kvist_router.tokens.template import ChatTemplate
from kvist_router.tokens.tokenizer import ModelTokenizer

PLAIN = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|s|>sys<|e|>\n{% endif %}"
    "{{ '<|s|>' + m['role'] + '\n' + m['content'] + '<|e|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}",
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages[1:] %}{{ m.content if m.role == 'user' else '<|e|>' ~ m.content }}{% endfor %}"
    "{{ messages | length }}",
)
LOOKING = (
    "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "{% for m in messages %}{% set c = m.content %}{{ c }}{% endfor %}",
    "{% for m in messages %}{% if 'x' in m.content %}y{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
    "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.content if loop.previtem else '' }}{% endfor %}",
    "{% for m in messages %}{{ m['con' + 'tent'] }}{% endfor %}",
    "{% for m in messages %}{{ m.get('content') }}{% endfor %}",
    "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
    "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    "{% for m in messages %}{{ [m.content] }}{% endfor %}",
    "{% set all = messages %}{% for m in all %}{{ m.content }}{% endfor %}",
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "{% macro f(x) %}{{ x }}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
    "{{ strftime_now('%S') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ messages | map(attribute='content') | join }}",
    "{% set x %}{{ messages[0].content }}{% endset %}{{ x | upper }}",
)
ADDED = ["<|s|>", "<|e|>", "<|e|><|", "xx"]
contents = st.text() | st.lists(st.sampled_from(["<|s|>", "<|", "e|>", "|>", "<", "x", " ", "\n"])).map(
    "".join
)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": contents}),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("source", PLAIN)
@given(messages=turns, generate=st.booleans())
def test_skeletons_give_the_rendered_text_cut_at_added_tokens(source, messages, generate: bool) -> None:
    template = ChatTemplate(source, {})
    assert template.inserts_content
    splitter = re.compile("(" + "|".join(re.escape(text) for text in sorted(ADDED, key=len)[::-1]) + ")")
    skeletons = Skeletons(template, splitter, ADDED)
    for texts in (messages, [{**message, "content": "again"} for message in messages]):
        conversation = template.accept({"messages": texts, "add_generation_prompt": generate})
        pieces = skeletons.pieces(conversation)
        text = template.render(conversation)
        assert "".join(pieces) == text
        found = [part for piece in pieces for part in splitter.split(piece) if part]
        assert found == [part for part in splitter.split(text) if part]


@pytest.mark.parametrize("source", LOOKING)
def test_templates_that_look_at_contents_are_rendered_every_time(source: str) -> None:
    assert not ChatTemplate(source, {}).inserts_content


async def _chat(tokenizer: ModelTokenizer, fields: dict[str, Any]) -> bytes | None:
    try:
        return b"".join(await tokenizer.chat(fields))
    except NotExact:
        return None


def test_a_real_tokenizer_gives_the_same_tokens_with_and_without_skeletons(smollm2: Path) -> None:
    fast, slow = (ModelTokenizer(smollm2, 2**20, 1000) for _ in range(2))
    assert fast._skeletons
    slow._skeletons = {}

    @given(messages=turns, generate=st.booleans())
    def check(messages: list[dict[str, str]], generate: bool) -> None:
        fields = {"messages": messages, "add_generation_prompt": generate}
        assert asyncio.run(_chat(fast, fields)) == asyncio.run(_chat(slow, fields))

    check()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([":", '":', "\\u003a"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)
OLD = ("messages", [{"role": "user", "content": "a:b"}])


def written(pairs: list[tuple[str, Any]], plain: bool) -> bytes:
    members = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=plain)}" for name, value in pairs)
    return ("{" + ", ".join(members) + "}").encode("utf-8", "surrogatepass")


@given(
    pairs=st.lists(st.tuples(st.text(max_size=2), values), max_size=5),
    plain=st.booleans(),
    escape=st.booleans(),
)
def test_bodies_are_read_as_the_standard_library_reads_them(pairs, plain: bool, escape: bool) -> None:
    body = written([OLD, *pairs], plain)
    if escape:
        body = body.replace(b"a:b", b"a\\u003ab")
    try:
        expected = json.loads(body.decode(), parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        with pytest.raises(Refused):
            parse(body, "chat")
        return
    names = [name for name, _ in pairs]
    special = {"model", "kv_transfer_params", "cache_salt", "kvist"} & set(names)
    if len({*names, "messages"}) <= len(names):
        with pytest.raises(Refused) as refused:
            parse(body, "chat")
        assert refused.value.refusal.code == "duplicate_key"
    elif not special:
        assert repr(parse(body, "chat").fields) == repr(expected)  # repr: -0.0, and ints are no floats


@pytest.mark.parametrize(
    "inner", [b'{"x": 1, "x": 2}', b'[[{"a:": ":", "a:": 1}]]', b'{"x\\u003a": 1, "y": 2, "y": 3}']
)
def test_duplicate_keys_are_found_at_any_depth(inner: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parse(b'{"messages": [{"role": "user"}], "z": ' + inner + b"}", "chat")
    assert refused.value.refusal.code == "duplicate_key"
