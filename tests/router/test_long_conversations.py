"""What a long conversation's next turn costs, in counted work, and that what is kept for it is bounded."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvist_connector.keys import chunk_keys
from kvist_router.tokens import keys as keys_module
from kvist_router.tokens.keys import KeyMemo
from kvist_router.tokens.tokenizer import ModelTokenizer

ROOT, CHUNK = b"r" * 16, 256
TURNS, TEXT = 25, "The quick brown fox, number {}, jumps over {} lazy dogs again. "
# Looks at contents, as templates of reasoning models do: rendered anew every time.
LOOKING = (
    "{% for m in messages %}{% if '</think>' in m.content %}{% set text = m.content.split('</think>')[-1] %}"
    "{% else %}{% set text = m.content %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def folder_of(smollm2: Path, tmp_path: Path, looking: bool) -> Path:
    if not looking:
        return smollm2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(LOOKING)
    return tmp_path


def long_text(number: int) -> str:
    return "".join(TEXT.format(number, turn) for turn in range(300))


@pytest.mark.parametrize("looking", [False, True])
def test_the_next_turn_encodes_and_hashes_its_new_text_only(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looking: bool
) -> None:
    hashed = 0
    plain = keys_module.next_key

    def counting(parent: bytes, packed: bytes) -> bytes:
        nonlocal hashed
        hashed += 1
        return plain(parent, packed)

    monkeypatch.setattr(keys_module, "next_key", counting)
    tokenizer, memo = ModelTokenizer(folder_of(smollm2, tmp_path, looking), 2**26, 10**9), KeyMemo(65_536)
    assert bool(tokenizer._skeletons) is not looking
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append({"role": ("user", "assistant")[turn % 2], "content": long_text(turn)})
    segments = asyncio.run(tokenizer.chat({"messages": messages}))
    memo.segment_keys(ROOT, segments, CHUNK)
    tokens = sum(map(len, segments)) // 4
    assert tokens > 100_000

    new = [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": long_text(99)[:4000]}]
    encoded, hashed = tokenizer.encoded_characters, 0
    segments = asyncio.run(tokenizer.chat({"messages": [*messages, *new]}))
    found = memo.segment_keys(ROOT, segments, CHUNK)
    written = sum(len(message["content"]) for message in new)
    assert tokenizer.encoded_characters - encoded <= written + 200
    added = sum(map(len, segments)) // 4 - tokens
    assert hashed <= added // CHUNK + 2
    assert found == chunk_keys(ROOT, memoryview(b"".join(segments)).cast("I"), CHUNK)


def test_the_segment_cache_is_bounded_in_bytes_of_memory(smollm2: Path) -> None:
    limit = 2**20
    tokenizer = ModelTokenizer(smollm2, limit, 10**9)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(3000):
        text = f"{number} \U0001f642 " * (1 + number % 40)  # four bytes a character
        asyncio.run(tokenizer.text(text))
        assert tokenizer.cache_size <= limit
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert tokenizer.cache_size > limit // 2
    assert held < 1.5 * limit
