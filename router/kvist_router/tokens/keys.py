"""Chunk keys of packed tokens, through a memo: a known chunk costs one hash of its bytes.

Called by mind/mind.py. The keys are those of kvist_connector.keys, which the memo only remembers.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvist_connector.keys import next_key

TOKEN_BYTES = 4


class KeyMemo:
    """(parent key, packed tokens) -> key, bounded. A whole generation is dropped when it is full."""

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2)
        self._young: dict[tuple[bytes, bytes], bytes] = {}
        self._old: dict[tuple[bytes, bytes], bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def chunk_keys(self, root: bytes, packed: bytes, chunk_tokens: int) -> list[bytes]:
        """Keys of all full chunks of packed tokens (little-endian u32)."""
        step = TOKEN_BYTES * chunk_tokens
        parent, keys = root, []
        for offset in range(0, len(packed) - step + 1, step):
            pair = (parent, packed[offset : offset + step])
            parent = self._young.get(pair) or self._remember(pair)
            keys.append(parent)
        return keys

    def tail_keys(self, parent: bytes, packed: bytes, block_tokens: int) -> Iterator[bytes]:
        """Keys of the prefixes of a partial chunk that end on an engine block, shortest first; lazily."""
        step = TOKEN_BYTES * block_tokens
        for end in range(step, len(packed) + 1, step):
            pair = (parent, packed[:end])
            yield self._young.get(pair) or self._remember(pair)

    def _remember(self, pair: tuple[bytes, bytes]) -> bytes:
        key = self._old.get(pair)
        if key is None:
            key = next_key(*pair)
        if len(self._young) >= self._half:
            self._old = self._young
            self._young = {}
        self._young[pair] = key
        return key
