"""Chunk keys of packed tokens, through a memo of segments. Called by mind/mind.py and mind/replica.py.

A conversation comes as the segments of its text (tokenizer.py), and those it had before are the
same objects, whose hashes Python keeps: following them costs a look-up each, however long they are. Keys are
those of kvist_connector.keys, which the memo only remembers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from kvist_connector.keys import next_key

TOKEN_BYTES = 4
CUT_BYTES = 1024  # segments of tokens that come in one piece
CHUNK_COST = 1200  # bytes that the memo takes for a chunk of the usual size
_NODE_COST = 200


class _Node(NamedTuple):
    """The end of a run of segments."""

    number: int  # names the run in the pairs that go on from here
    keys: tuple[bytes, ...]  # of the chunks that end in its last segment
    last: bytes  # key of the last full chunk, or the root
    rest: bytes  # tokens after it


class KeyMemo:
    """Bounded by `capacity` chunks of the usual size. A whole generation is dropped when it is full."""

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2) * CHUNK_COST
        self._numbers = count()
        self._young: dict[tuple[object, bytes], _Node] = {}
        self._old: dict[tuple[object, bytes], _Node] = {}
        self._size = 0
        self._tails: dict[tuple[bytes, bytes], bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old) + len(self._tails)

    def chunk_keys(self, root: bytes, packed: bytes, chunk_tokens: int) -> list[bytes]:
        """Keys of all full chunks of packed tokens (little-endian u32)."""
        return self.segment_keys(root, cut(packed), chunk_tokens)

    def segment_keys(self, root: bytes, segments: Sequence[bytes], chunk_tokens: int) -> list[bytes]:
        """The same for tokens in segments, whatever their lengths are."""
        at: object = (root, chunk_tokens)
        before = _Node(-1, (), root, b"")
        keys: list[bytes] = []
        young = self._young
        for segment in segments:
            node = young.get((at, segment))
            if node is None:
                node = self._remember((at, segment), before, TOKEN_BYTES * chunk_tokens)
                young = self._young
            keys += node.keys
            before, at = node, node.number
        return keys

    def tail_keys(self, parent: bytes, packed: bytes, block_tokens: int) -> Iterator[bytes]:
        """Keys of the prefixes of a partial chunk that end on an engine block, shortest first; lazily."""
        step = TOKEN_BYTES * block_tokens
        for end in range(step, len(packed) + 1, step):
            pair = (parent, packed[:end])
            yield self._tails.get(pair) or self._remember_tail(pair)

    def _remember(self, pair: tuple[object, bytes], before: _Node, step: int) -> _Node:
        node = self._old.get(pair)
        if node is None:
            node = _follow(next(self._numbers), pair[1], before, step)
        self._size += len(pair[1]) + len(node.rest) + 16 * len(node.keys) + _NODE_COST
        if self._size > self._half:
            self._old, self._young, self._size = self._young, {}, 0
        self._young[pair] = node
        return node

    def _remember_tail(self, pair: tuple[bytes, bytes]) -> bytes:
        if len(self._tails) * CHUNK_COST >= self._half:
            self._tails.clear()
        key = self._tails[pair] = next_key(*pair)
        return key


def cut(packed: bytes) -> list[bytes]:
    """Tokens that come in one piece, in segments: a longer prompt begins with those of a shorter one."""
    return [packed[offset : offset + CUT_BYTES] for offset in range(0, len(packed), CUT_BYTES)]


def _follow(number: int, segment: bytes, before: _Node, step: int) -> _Node:
    rest, last, keys = before.rest + segment, before.last, []
    end = len(rest) // step * step
    for offset in range(0, end, step):
        last = next_key(last, rest[offset : offset + step])
        keys.append(last)
    return _Node(number, tuple(keys), last, rest[end:])
