"""A model whose KV of a position is a digest of all tokens up to it: the oracle of the scheduler tests."""

from __future__ import annotations

from blake3 import blake3

BLOCK = 32
CHUNK = 256
LAYERS = 3
TOKEN_BYTES = 16
VOCABULARY = 5000


def extend(digests: list[bytes], tokens: list[int]) -> list[bytes]:
    """KV of every position: a digest of all tokens up to it, chained."""
    for token in tokens[len(digests) :]:
        before = digests[-1] if digests else b""
        digests.append(blake3(before + token.to_bytes(4, "little")).digest(TOKEN_BYTES))
    return digests


def says(digest: bytes) -> int:
    """The token after a prefix."""
    return int.from_bytes(digest[:4], "little") % VOCABULARY


def next_token(tokens: list[int]) -> int:
    return says(extend([], tokens)[-1])


def expected_output(prompt: list[int], count: int) -> list[int]:
    """The oracle: the model without any cache."""
    tokens = list(prompt)
    digests = extend([], tokens)
    for _ in range(count):
        tokens.append(says(digests[-1]))
        extend(digests, tokens)
    return tokens[len(prompt) :]
