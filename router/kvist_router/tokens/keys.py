"""Chunk keys of packed tokens, through a memo of segments. Called by mind/mind.py and mind/replica.py.

A conversation comes as the segments of its text (tokenizer.py), and those it had before are the
same objects, whose hashes Python keeps: following them costs a look-up each, however long they are. Keys are
those of kvist_connector.keys, which the memo only remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from kvist_connector.keys import next_key

TOKEN_BYTES = 4
CUT_BYTES = 1024  # segments of tokens that come in one piece
CHUNK_COST = 1200  # bytes that the memo takes for a chunk of the usual size
_NODE_COST = 200


class Prompt:
    """Tokens of one prompt in segments; in one piece only if somebody asks for it."""

    __slots__ = ("_packed", "segments", "size")

    def __init__(self, segments: Sequence[bytes]) -> None:
        self.segments = segments
        self.size = sum(map(len, segments))  # bytes
        self._packed: bytes | None = None

    @classmethod
    def whole(cls, packed: bytes) -> Prompt:
        """Tokens that came in one piece."""
        return cls(cut(packed))

    @property
    def tokens(self) -> int:
        """How many."""
        return self.size // TOKEN_BYTES

    @property
    def packed(self) -> bytes:
        """All of them."""
        if self._packed is None:
            self._packed = b"".join(self.segments)
        return self._packed


class Chain(NamedTuple):
    """One prompt of a request with the keys of its chunks under `root`."""

    root: bytes
    keys: list[bytes]
    tokens: int
    prompt: Prompt
    rest: bytes  # packed tokens after the last chunk


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
        self._tails: dict[tuple[object, int], bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old) + len(self._tails)

    def chunk_keys(self, root: bytes, packed: bytes, chunk_tokens: int) -> list[bytes]:
        """Keys of all full chunks of packed tokens (little-endian u32)."""
        return self.segment_keys(root, cut(packed), chunk_tokens)

    def segment_keys(self, root: bytes, segments: Sequence[bytes], chunk_tokens: int) -> list[bytes]:
        """The same for tokens in segments, whatever their lengths are."""
        return self._walk(root, segments, chunk_tokens)[0]

    def chain(self, root: bytes, prompt: Prompt, chunk_tokens: int) -> Chain:
        """A prompt with its keys."""
        keys, rest = self._walk(root, prompt.segments, chunk_tokens)
        return Chain(root, keys, prompt.tokens, prompt, rest)

    def _walk(self, root: bytes, segments: Sequence[bytes], chunk_tokens: int) -> tuple[list[bytes], bytes]:
        """Keys, and the tokens after the last chunk."""
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
        return keys, before.rest

    def leading_blocks(
        self, chain: Chain, chunks: int, chunk_tokens: int, block_tokens: int, held: Callable[[bytes], bool]
    ) -> int:
        """Engine blocks of what follows the first `chunks` that are `held`, up to a whole chunk."""
        keys, tails, step = chain.keys, self._tails, TOKEN_BYTES * block_tokens
        start = TOKEN_BYTES * chunk_tokens * chunks
        size = min(TOKEN_BYTES * chunk_tokens, chain.prompt.size - start)
        parent = keys[chunks - 1] if chunks else chain.root
        # The key of a whole chunk names its beginnings, too.
        name: object = keys[chunks] if chunks < len(keys) else (parent, chain.rest)
        for end in range(step, size + 1, step):
            key = tails.get((name, end))
            if key is None:
                key = self._remember_tail((name, end), parent, chain.prompt.packed[start : start + end])
            if not held(key):
                return end // step - 1
        return max(0, size) // step

    def _remember(self, pair: tuple[object, bytes], before: _Node, step: int) -> _Node:
        node = self._old.get(pair)
        if node is None:
            node = _follow(next(self._numbers), pair[1], before, step)
        self._size += len(pair[1]) + len(node.rest) + 16 * len(node.keys) + _NODE_COST
        if self._size > self._half:
            self._old, self._young, self._size = self._young, {}, 0
        self._young[pair] = node
        return node

    def _remember_tail(self, named: tuple[object, int], parent: bytes, packed: bytes) -> bytes:
        if len(self._tails) * CHUNK_COST >= self._half:
            self._tails.clear()
        key = self._tails[named] = next_key(parent, packed)
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
