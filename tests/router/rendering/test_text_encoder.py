"""New text is encoded by the quick library where that gives what the engine's gives, else by the engine's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastokens
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from kvist_connector.keys import pack_tokens
from kvist_router.tokens.text_encoder import TextEncoder

FAMILIES = [
    "smollm2",
    "qwen3",
    "deepseek-v3",
    "llama3",
    "minimax",
    pytest.param("mistral", marks=pytest.mark.full),
]
PIECES = [
    "a",
    " the",
    "\n",
    "  ",
    "\r\n",
    "'s",
    "'LL",
    "2026",
    "日本",
    "é",
    "e\u0301",
    "😀",
    "👩‍👩‍👧",
    "\u0130",
    "\u0004",
]
EVERYTHING = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Both:
    """A model's own tokenizer and our encoder of the same file."""

    def __init__(self, file: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(file))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.encoder = TextEncoder(file, self.tokenizer)
        self.added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]

    def expected(self, text: str) -> bytes:
        return pack_tokens(self.tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module", params=FAMILIES)
def both(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Both:
    return Both(model_folder(request.param) / "tokenizer.json")


def test_the_quick_library_encodes_every_family(both: Both) -> None:
    assert both.encoder.is_quick


@EVERYTHING
@given(data=st.data())
def test_tokens_are_those_of_the_models_tokenizer(both: Both, data: Any) -> None:
    some = st.one_of(
        st.sampled_from(PIECES), st.sampled_from(both.added), st.text(st.characters(codec="utf-8"))
    )
    text = "".join(data.draw(st.lists(some, max_size=12)))
    assert both.encoder.packed([text, "b"]) == [both.expected(text), both.expected("b")]


def test_a_long_text_has_the_same_tokens(both: Both) -> None:
    text = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))) * 2
    assert both.encoder.packed([text]) == [both.expected(text)]


@pytest.mark.parametrize("text", ["\ud800", "a\udfff b"])
def test_lone_surrogates_are_refused(both: Both, text: str) -> None:
    with pytest.raises((UnicodeEncodeError, TypeError)):
        both.encoder.packed([text])


def test_a_model_that_the_quick_library_does_not_know_is_encoded_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(file))
    both = Both(file)
    assert not both.encoder.is_quick
    assert both.encoder.packed(["a", "b"]) == [pack_tokens([0]), pack_tokens([1])]


def test_a_library_that_encodes_a_probe_otherwise_is_not_used(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, other = fastokens.Tokenizer.from_file, str(model_folder("qwen3") / "tokenizer.json")
    monkeypatch.setattr(fastokens, "Tokenizer", type("Wrong", (), {"from_file": lambda path: real(other)}))
    both = Both(model_folder("smollm2") / "tokenizer.json")
    assert not both.encoder.is_quick
    assert "fastokens encodes" in caplog.text
    assert "The quick brown fox" in caplog.text
    assert both.encoder.packed(["hello world"]) == [both.expected("hello world")]
