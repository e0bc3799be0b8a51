"""Text to tokens through a cache of segments: the pieces between added tokens.

Called by tokenizer.py. Invariant: `split` then encoding each piece gives exactly the tokens of
encoding the whole text. That holds when

- added tokens are taken out of the raw text before anything else, leftmost-longest, and none
  looks at its neighbours (no lstrip, rstrip, single_word), and
- normalizer and pre-tokenizer treat a piece alike wherever it stands.

`exact_splitter` returns None for a tokenizer where this is not known; text is then encoded whole.
"""

from __future__ import annotations

import re
from typing import Any

_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Replace"})
_PRE_TOKENIZERS = frozenset(
    {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
)


def exact_splitter(tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """A pattern whose matches are the added tokens, from the content of tokenizer.json."""
    added = tokenizer.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") or token.get("single_word") for token in added):
        return None
    if not _position_free(tokenizer.get("normalizer"), _NORMALIZERS):
        return None
    if not _position_free(tokenizer.get("pre_tokenizer"), _PRE_TOKENIZERS):
        return None
    if (
        tokenizer.get("truncation")
        or tokenizer.get("padding")
        or (tokenizer.get("model") or {}).get("dropout")
    ):
        return None
    texts = split_tokens(tokenizer)
    if not texts:
        return None
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("(" + "|".join(re.escape(text) for text in longest_first) + ")")


def split_tokens(tokenizer: dict[str, Any]) -> list[str]:
    """Added tokens that are found in the raw text."""
    added = tokenizer.get("added_tokens") or []
    return [token["content"] for token in added if not token.get("normalized") and token["content"]]


def _position_free(part: dict[str, Any] | None, known: frozenset[str]) -> bool:
    if part is None:
        return True
    if part["type"] == "Sequence":
        inner = part.get("normalizers") or part.get("pretokenizers") or []
        return all(_position_free(item, known) for item in inner)
    if part["type"] == "ByteLevel":
        return not part.get("add_prefix_space", False)
    return part["type"] in known
