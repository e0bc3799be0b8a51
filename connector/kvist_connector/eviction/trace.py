"""Traces of requests in the Mooncake format: JSON lines, plain or gzip.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, block, ...]}

`output_length` may be left out. `hash_ids` name the blocks of the prompt, 512 tokens each; the last
one may be shorter. A block is identified by its id and all before it, so that ids need not be hashes of
whole prefixes.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvist_connector.errors import ConfigError

BLOCK_TOKENS: Final = 512
_PROGRESS_LINES: Final = 256


@dataclass
class Trace:
    """Requests in order. Memory: 12 bytes a block of a request, and a table of the distinct blocks."""

    block_tokens: int = BLOCK_TOKENS
    blocks: array[int] = field(default_factory=lambda: array("q"))  # of all requests; distinct ones from 0
    starts: array[int] = field(
        default_factory=lambda: array("q", [0])
    )  # request i is starts[i]..starts[i + 1]
    parents: array[int] = field(default_factory=lambda: array("q"))  # by block; -1: first of its prompt
    tails: array[int] = field(default_factory=lambda: array("q"))  # by request: tokens of its last block
    answers: array[int] = field(default_factory=lambda: array("q"))  # by request: tokens decoded

    def __len__(self) -> int:
        return len(self.tails)

    @property
    def distinct(self) -> int:
        """Blocks that a cache without limit would hold."""
        return len(self.parents)

    def request(self, number: int) -> array[int]:
        """The blocks of one prompt."""
        return self.blocks[self.starts[number] : self.starts[number + 1]]

    def tokens(self, number: int, blocks: int) -> int:
        """Of the first `blocks` blocks of a prompt."""
        whole = blocks * self.block_tokens
        last = blocks == self.starts[number + 1] - self.starts[number] and blocks > 0
        return whole - self.block_tokens + self.tails[number] if last else whole


class _Builder:
    def __init__(self, block_tokens: int) -> None:
        self.trace = Trace(block_tokens)
        self._known: dict[tuple[int, int | str], int] = {}

    def add(self, length: int, ids: Iterable[int | str], answer: int = 0) -> None:
        trace, parent, before = self.trace, -1, len(self.trace.blocks)
        for name in ids:
            number = self._known.setdefault((parent, name), len(self._known))
            if number == len(trace.parents):
                trace.parents.append(parent)
            trace.blocks.append(number)
            parent = number
        count = len(trace.blocks) - before
        if count:
            trace.starts.append(len(trace.blocks))
            trace.tails.append(max(1, min(trace.block_tokens, length - (count - 1) * trace.block_tokens)))
            trace.answers.append(answer)


def trace_of(requests: Iterable[tuple[int, Iterable[int | str]]], block_tokens: int = BLOCK_TOKENS) -> Trace:
    """From pairs of prompt length in tokens and block ids; answers are not known."""
    builder = _Builder(block_tokens)
    for length, ids in requests:
        builder.add(length, ids)
    return builder.trace


def read_trace(
    path: Path, block_tokens: int = BLOCK_TOKENS, progress: Callable[[int], None] = lambda lines: None
) -> Trace:
    """Read line by line; `progress` hears the number of lines. ConfigError names file and line."""
    builder = _Builder(block_tokens)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(_whole(lines), 1):
                builder.add(*_request(path, number, line))
                if number % _PROGRESS_LINES == 0:
                    progress(number)
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"trace {path}: {error.strerror if isinstance(error, OSError) else error}"
        ) from error
    if not len(builder.trace):
        raise ConfigError(f"trace {path}: no request in it: give JSON lines with input_length and hash_ids")
    return builder.trace


def _whole(lines: Iterable[bytes]) -> Iterator[bytes]:
    return (line for line in lines if line.strip())


def _request(path: Path, number: int, line: bytes) -> tuple[int, list[int | str], int]:
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"trace {path}, request {number}: no JSON ({error})") from error
    length = found.get("input_length") if isinstance(found, dict) else None
    ids = found.get("hash_ids") if isinstance(found, dict) else None
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise ConfigError(
            f"trace {path}, request {number}: input_length is {length!r}, not a number of tokens"
        )
    if not isinstance(ids, list) or not all(isinstance(one, int | str) for one in ids):
        raise ConfigError(f"trace {path}, request {number}: hash_ids is no list of block ids")
    answer = found.get("output_length", 0)
    if not isinstance(answer, int) or isinstance(answer, bool) or answer < 0:
        raise ConfigError(
            f"trace {path}, request {number}: output_length is {answer!r}, not a number of tokens"
        )
    return length, ids, answer
