"""An engine's pages and an arena without an engine: what bench.arena moves bytes between.

Copies run through the code of the worker half: header checks, gate, loader thread. Sizes are those of a
model with 64 KiB of KV a token (16 layers, 8 KV heads of 128, 16-bit values).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvist_connector.arena import geometry as layout
from kvist_connector.arena.headers import State
from kvist_connector.engines.vllm.layout import read_pages
from kvist_connector.protocol.engine import Geometry
from kvist_connector.transfer.arena_view import ArenaView
from kvist_connector.transfer.base import Transfer
from kvist_connector.transfer.cpu import CpuCopier
from kvist_connector.transfer.gate import Gate
from kvist_connector.transfer.pages import PageTable
from kvist_connector.transfer.plan import Piece

LAYERS: Final = 16
BLOCK_TOKENS: Final = 16
SHAPE: Final = (8, BLOCK_TOKENS, 256)  # KV heads, tokens, both halves of a head
TOKEN_BYTES: Final = 64 * 1024
PAGE_BYTES: Final = TOKEN_BYTES * BLOCK_TOKENS // LAYERS  # of one layer
KEY: Final = b"k" * 16
Bytes = npt.NDArray[np.uint8]


@dataclass
class Pages:
    """All layers in one storage, as vLLM's CPU backend keeps them."""

    storage: torch.Tensor
    count: int

    @classmethod
    def make(cls, tokens: int) -> Pages:
        """Room for so many tokens, and a quarter more, so that pages can lie scattered."""
        count = tokens // BLOCK_TOKENS * 5 // 4
        return cls(torch.randint(-1000, 1000, (LAYERS, count, *SHAPE), dtype=torch.int16), count)

    def table(self, chunk_tokens: int) -> PageTable:
        """As the worker half reads it."""
        caches = {f"layer.{n}": self.storage[n].view(torch.bfloat16) for n in range(LAYERS)}
        return read_pages(caches, self.count, BLOCK_TOKENS, chunk_tokens)

    def rows(self) -> Bytes:
        """[layers, pages, bytes of a page]"""
        return self.storage.view(torch.uint8).numpy().reshape(LAYERS, self.count, PAGE_BYTES)


@dataclass
class Rig:
    """Pages, an arena, and what copies between them."""

    transfer: Transfer
    view: ArenaView
    pages: Pages

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return self.view.geometry.slots * layout.slot_bytes(self.view.geometry)

    def load(self, pieces: Sequence[Piece]) -> float:
        """Seconds from committed slots to pages."""
        self._mark(State.COMMITTED, pieces)
        began = time.perf_counter()
        load(self.transfer, pieces)
        return time.perf_counter() - began

    def store(self, pieces: Sequence[Piece]) -> float:
        """Seconds from pages to reserved slots."""
        self._mark(State.RESERVED, pieces)
        began = time.perf_counter()
        store(self.transfer, pieces)
        return time.perf_counter() - began

    def memcpy(self, storing: bool) -> float:
        """Seconds that one copy of as many neighbouring bytes takes, on one thread."""
        slots = self.view.slots.reshape(-1)[: self.size]
        pages = self.pages.rows().reshape(-1)[: self.size]
        target, source = (slots, pages) if storing else (pages, slots)
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    def pieces(self, scattered: bool) -> list[Piece]:
        """Every slot's pages: side by side as a fresh engine has them, or as one that has evicted."""
        numbers = list(range(self.pages.count))
        if scattered:
            random.Random(1).shuffle(numbers)
        blocks = self.view.geometry.blocks
        return [
            Piece(slot, 1, 0, tuple(numbers[slot * blocks : (slot + 1) * blocks]), KEY, slot)
            for slot in range(self.view.geometry.slots)
        ]

    def _mark(self, state: State, pieces: Sequence[Piece]) -> None:
        """Headers as the agent would write them."""
        for piece in pieces:
            self.view.headers.write(piece.slot, 1, state, KEY)


@contextmanager
def rig(path: Path, pages: Pages, chunk_tokens: int, tokens: int) -> Iterator[Rig]:
    """An arena of its own for `tokens` tokens."""
    table = pages.table(chunk_tokens)
    geometry = Geometry(
        slots=tokens // chunk_tokens,
        ranks=1,
        layers=LAYERS,
        layer_bytes=table.layer_bytes,
        blocks=table.blocks,
        chunk_tokens=chunk_tokens,
    )
    with path.open("wb") as file:
        file.truncate(layout.file_bytes(geometry))
        file.seek(0)
        file.write(layout.pack_superblock(geometry, b"f", 1))
    view = ArenaView(path, geometry, 0)
    view.populate()
    transfer = attached(table, view)
    try:
        yield Rig(transfer, view, pages)
    finally:
        transfer.close()
        transfer.attach(None)
        path.unlink()


def attached(table: PageTable, view: ArenaView) -> Transfer:
    """A worker's copies between these pages and this arena."""
    transfer = Transfer(CpuCopier(table), Gate(lambda ticket: None))
    transfer.attach(view)
    return transfer


def load(transfer: Transfer, pieces: Sequence[Piece]) -> None:
    """One step's loads, all layers waited for; raises when one failed."""
    transfer.begin_loads(pieces)
    for layer in range(LAYERS):
        transfer.wait_layer(layer)
    failed = transfer.end_loads().failed
    if failed:
        raise RuntimeError(f"{len(failed)} loads failed")


def store(transfer: Transfer, pieces: Sequence[Piece]) -> None:
    """One step's stores; raises when one was refused."""
    transfer.store(pieces)
    if len(transfer.collect().filled) != len(pieces):
        raise RuntimeError("a store was refused")
