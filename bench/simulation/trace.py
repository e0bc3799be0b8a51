"""Requests of a simulation, read from a trace in Mooncake's format.

A trace is JSON lines (gzip when the name ends so) with `timestamp` in ms, `input_length`,
`output_length` and `hash_ids`, one id for each block of 512 tokens, the last one partial.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `blocks` are its full blocks: only those are reused."""

    number: int
    at: float  # seconds from the start
    tokens: int
    output: int
    blocks: tuple[int, ...]


def read_trace(path: Path, speed: float = 1.0, most: int | None = None) -> list[Request]:
    """The first `most` requests of a trace, arriving `speed` times as fast."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = data.splitlines()
    found = []
    for number, line in enumerate(lines[:most]):
        row = json.loads(line)
        full = row["input_length"] // BLOCK_TOKENS
        found.append(
            Request(number, row["timestamp"] / 1000 / speed, row["input_length"],
                    max(1, row["output_length"]), tuple(row["hash_ids"][:full]))
        )  # fmt: skip
    return found
