"""Rules of the token path that need no model: when segments are exact, templates, special tokens, memo."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvist_connector.errors import ConfigError
from kvist_connector.keys import chunk_keys, pack_tokens, tail_keys
from kvist_router.errors import NotExact
from kvist_router.tokens.keys import KeyMemo, Prompt
from kvist_router.tokens.lru import SizedLRU
from kvist_router.tokens.segments import exact_splitter
from kvist_router.tokens.template import ChatTemplate
from kvist_router.tokens.tokenizer import ModelTokenizer

LETTERS = "abc <>|"


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    return {"content": content, **plain, **flags}


@pytest.mark.parametrize(
    "change",
    [
        {"added_tokens": [token("<a>", rstrip=True)]},
        {"added_tokens": [token("<a>"), token("<b>", lstrip=True)]},
        {"added_tokens": [token("<a>", single_word=True)]},
        {"added_tokens": [token("<a>", normalized=True)]},
        {"added_tokens": []},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Unheard"}]}},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"model": {"dropout": 0.1}},
        {"truncation": {"max_length": 5}},
    ],
)
def test_segments_are_refused_where_a_piece_depends_on_its_place(change: dict[str, Any]) -> None:
    good = {
        "added_tokens": [token("<a>")],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Digits"},
    }
    assert exact_splitter(good) is not None
    assert exact_splitter({**good, **change}) is None


def test_the_longest_added_token_wins() -> None:
    splitter = exact_splitter({"added_tokens": [token("<a>"), token("<a>b")]})
    assert splitter is not None
    assert splitter.split("x<a>by<a>z") == ["x", "<a>b", "y", "<a>", "z"]


def folder_with(tmp_path: Path, config: dict[str, Any], special: bool, template: str | None = None) -> Path:
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)} | {"<s>": 20, "<m>": 21}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.add_special_tokens(["<s>", "<m>"])
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 20)]
        )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


@settings(deadline=None)
@given(text=st.lists(st.sampled_from([*LETTERS, "<s>", "<m>"]), max_size=20).map("".join))
def test_pieces_give_the_tokens_of_the_whole(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = folder_with(tmp_path_factory.mktemp("m"), {}, special=True)
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = ModelTokenizer(folder, 10_000, 100)
    assert b"".join(asyncio.run(ours.text(text))) == pack_tokens(whole.encode(text).ids)


def test_completions_get_special_tokens_chats_those_of_the_template(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ours = ModelTokenizer(
        folder_with(tmp_path, {"bos_token": {"content": "<m>"}}, True, template), 10_000, 100
    )
    assert b"".join(asyncio.run(ours.text("a"))) == pack_tokens([20, 0])
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    assert b"".join(asyncio.run(ours.chat(chat))) == pack_tokens([21, 0, 1])


def test_a_config_that_contradicts_the_tokenizer_is_not_trusted(tmp_path: Path) -> None:
    ours = ModelTokenizer(folder_with(tmp_path, {"add_bos_token": True}, special=False), 10_000, 100)
    with pytest.raises(NotExact):
        asyncio.run(ours.text("a"))
    with pytest.raises(NotExact, match="no template"):
        asyncio.run(ours.chat({"messages": []}))


def test_a_folder_without_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("model.path: ") + ".*Hugging Face model folder"):
        ModelTokenizer(tmp_path, 0, 0)


def render(source: str, **fields: Any) -> str:
    template = ChatTemplate(source, {"eos_token": "E"})
    return template.render(template.accept({"messages": [{"role": "user", "content": "c"}], **fields}))


def test_templates_have_what_transformers_gives_them() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{% for m in messages %}{% break %}{% endfor %}{{ eos_token }}") == "E"
    assert render("  {% if add_generation_prompt %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("{% generation %}g{% endgeneration %}") == "g"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    with pytest.raises(NotExact):
        render("{{ raise_exception('no') }}")
    with pytest.raises(NotExact):
        render("{{ messages.append(1) }}")


def test_templates_that_loop_over_content_get_parts() -> None:
    source = "{% for m in messages %}{% for c in m['content'] %}[{{ c['text'] }}]{% endfor %}{% endfor %}"
    assert render(source) == "[c]"


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    cuts=st.lists(st.integers(0, 70), max_size=6).map(sorted),
    chunk=st.sampled_from([4, 16]),
    capacity=st.sampled_from([0, 3, 1000]),
)
def test_the_memo_gives_the_keys_of_the_formula(
    tokens: list[int], cuts: list[int], chunk: int, capacity: int
) -> None:
    memo = KeyMemo(capacity)
    packed = pack_tokens(tokens)
    edges = [0, *(4 * place for place in cuts), len(packed)]
    segments = [packed[start:end] for start, end in pairwise(edges)]
    for root in (b"r" * 16, b"s" * 16, b"r" * 16):
        assert memo.chunk_keys(root, packed, chunk) == chunk_keys(root, tokens, chunk)
        assert memo.segment_keys(root, segments, chunk) == chunk_keys(root, tokens, chunk)
        # One that goes on from the middle of what is known, with other chunks too.
        assert memo.segment_keys(root, [*segments[:2], packed], chunk) == chunk_keys(
            root, [*tokens[: len(b"".join(segments[:2])) // 4], *tokens], chunk
        )
        assert memo.segment_keys(root, segments, 2 * chunk) == chunk_keys(root, tokens, 2 * chunk)
        chain = memo.chain(root, Prompt(segments), chunk)
        for chunks in range(len(chain.keys) + 1):
            parent = chain.keys[chunks - 1] if chunks else root
            tails = tail_keys(parent, tokens[chunks * chunk : (chunks + 1) * chunk], 2, chunk)
            for held in range(len(tails) + 1):
                assert memo.leading_blocks(chain, chunks, chunk, 2, set(tails[:held]).__contains__) == held


def test_the_memo_is_bounded_by_what_it_holds() -> None:
    memo = KeyMemo(100)
    for number in range(2000):
        memo.segment_keys(b"r" * 16, [number.to_bytes(4, "little") * 512], 256)
        memo.leading_blocks(
            memo.chain(number.to_bytes(16, "little"), Prompt.whole(bytes(256)), 256),
            0,
            256,
            64,
            lambda _: True,
        )
    assert len(memo) <= 300


def test_the_cache_is_bounded_and_forgets_the_least_used() -> None:
    cache: SizedLRU[str, int] = SizedLRU(10)
    cache.put("a", 1, 5)
    cache.put("b", 2, 5)
    assert cache.get("a") == 1
    cache.put("c", 3, 5)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    cache.put("d", 4, 11)
    assert cache.get("d") is None
    assert cache.size == 10
