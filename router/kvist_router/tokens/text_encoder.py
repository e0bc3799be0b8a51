"""Text to packed tokens, by the quickest library that gives what the engine's tokenizer gives.

`fastokens` encodes new text some ten times as fast as `tokenizers`, which is what the engine uses. It knows
BPE only, and refuses what it does not know. It is used for a model whose probes it encodes alike, and a text
that it refuses goes to `tokenizers`. Called by encoding.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import fastokens
from tokenizers import Tokenizer

from kvist_connector.keys import pack_tokens

_log = logging.getLogger(__name__)

MOST_ADDED: Final = 256  # added tokens that are probed
PROBES: Final = (
    "The quick brown fox, it's 12,345.67 (or 3.14e-10)!",
    "I'LL we'Ve they'd CAN'T don’t \"quoted\" 'single' a_b c-d e/f",
    "def f(x):\n    return {'a': [1, 2],\t\"b\": x ** 2}\r\n\r\n\n\n  # end\n",
    " leading,  double,   triple,\u00a0no-break\u2003em\u200bzero\ufeff trailing ",
    "Ünïcödé e\u0301 \u1e9b\u0323 ﬁ Å ſ İstanbul ß ΣΑΣ ǅ Привет мир",
    "日本語のテキスト、中文字符。한국어 ไทย हिन्दी العربية עברית ١٢٣ ੪੫",
    "😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽 ∑∫√ ½ ² ™ \U00020000\U0001f9d1\U0010ffff",
    "".join(map(chr, range(32, 127))) * 2,
    "0123456789" * 9 + " aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ...... ------ ======== \n \n  \n",
    "https://example.org/a?b=c&d=%20#e <b>x</b> &amp; \\u0041 $x^{2}$ `code` ~~~ |a|b|",
    "supercalifragilisticexpialidocious antidisestablishmentarianism Donaudampfschifffahrt " * 3,
)


class TextEncoder:
    """`tokenizer` is of the same file, without truncation and padding."""

    def __init__(self, file: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._quick = _quick(file, tokenizer)

    @property
    def is_quick(self) -> bool:
        """Whether the quicker library encodes this model's text."""
        return self._quick is not None

    def packed(self, pieces: Sequence[str]) -> list[bytes]:
        """Packed tokens of each piece, special tokens inside it as such and none around it.

        Raises UnicodeEncodeError or TypeError for lone surrogates. Releases the GIL.
        """
        if self._quick is None:
            return _by_tokenizers(self._tokenizer, pieces)
        found = []
        for piece in pieces:
            try:
                found.append(_by_fastokens(self._quick, piece))
            except ValueError:  # a byte without a token: `tokenizers` leaves it out
                found += _by_tokenizers(self._tokenizer, [piece])
        return found


def _by_tokenizers(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[bytes]:
    encodings = tokenizer.encode_batch_fast(list(pieces), add_special_tokens=False)
    return [pack_tokens(encoding.ids) for encoding in encodings]


def _by_fastokens(quick: fastokens.Tokenizer, piece: str) -> bytes:
    packed: bytes = quick.encode_batch_flat([piece])[0]
    return packed


def _quick(file: Path, tokenizer: Tokenizer) -> fastokens.Tokenizer | None:
    try:
        quick = fastokens.Tokenizer.from_file(str(file))
    except (ValueError, OSError) as error:
        _log.info("%s: text is encoded by tokenizers: %s", file, error)
        return None
    quick.no_truncation()
    quick.no_padding()
    for probe in _probes(tokenizer):
        try:
            found = _by_fastokens(quick, probe)
        except ValueError:
            continue
        if found != _by_tokenizers(tokenizer, [probe])[0]:
            _log.warning("%s: text is encoded by tokenizers, fastokens encodes %r otherwise", file, probe)
            return None
    return quick


def _probes(tokenizer: Tokenizer) -> list[str]:
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:MOST_ADDED]
    return [*PROBES, *(f"a {token} b{token}{token}\n{token}c" for token in added)]
