"""CPU copies between an engine's pages and the arena, against plain memcpy of the same bytes.

    python -m bench.copy [--json FILE] [--check] [--quick]

16 chunks of SmolLM2-135M (30 layers, 24,576 bytes a page and layer, 94 MB), through the code that
the worker runs: header checks, gate, loader thread. The limit is one numpy memcpy of as many bytes
between the same two mappings, measured in the same round. Pages lie side by side, as a fresh engine
allocates them, or scattered, as one does that has evicted.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench import harness
from bench.harness import Goal, Options, Result, Table
from kvist_connector.arena import geometry as layout
from kvist_connector.arena.headers import State
from kvist_connector.engines.vllm.layout import read_pages
from kvist_connector.protocol.engine import Geometry
from kvist_connector.transfer.arena_view import ArenaView
from kvist_connector.transfer.base import Transfer
from kvist_connector.transfer.cpu import CpuCopier
from kvist_connector.transfer.gate import Gate
from kvist_connector.transfer.plan import Piece

GOAL = 0.8  # of memcpy's speed
CHUNKS, LAYERS, BLOCKS, BLOCK_TOKENS, PAGES = 16, 30, 8, 32, 320
SHAPE = (3, BLOCK_TOKENS, 128)  # KV heads, tokens, both halves of a head; bf16
KEY = b"k" * 16


@dataclass
class Rig:
    """Pages, an arena and the bytes that both sides of a comparison move."""

    transfer: Transfer
    view: ArenaView
    pages: torch.Tensor

    @property
    def size(self) -> int:
        """Bytes of all chunks."""
        return CHUNKS * layout.slot_bytes(self.view.geometry)

    def mark(self, state: State) -> None:
        """Headers as the agent would write them."""
        for slot in range(CHUNKS):
            self.view.headers.write(slot, 1, state, KEY)

    def load(self, pieces: list[Piece]) -> float:
        """Seconds."""
        self.mark(State.COMMITTED)
        began = time.perf_counter()
        self.transfer.begin_loads(pieces)
        for layer in range(LAYERS):
            self.transfer.wait_layer(layer)
        failed = self.transfer.end_loads().failed
        seconds = time.perf_counter() - began
        if failed:
            raise RuntimeError(f"{len(failed)} loads failed")
        return seconds

    def store(self, pieces: list[Piece]) -> float:
        """Seconds."""
        self.mark(State.RESERVED)
        began = time.perf_counter()
        self.transfer.store(pieces)
        seconds = time.perf_counter() - began
        if len(self.transfer.collect().filled) != CHUNKS:
            raise RuntimeError("a store was refused")
        return seconds

    def memcpy(self, store: bool) -> float:
        """Seconds that one copy of as many neighbouring bytes takes."""
        slots = self.view.slots.reshape(-1)[: self.size]
        pages = self.pages.view(torch.uint8).numpy().reshape(-1)[: self.size]
        target, source = (slots, pages) if store else (pages, slots)
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began


def make_rig(folder: Path) -> Rig:
    """All layers in one storage, as vLLM's CPU backend keeps them."""
    pages = torch.randint(-1000, 1000, (LAYERS, PAGES, *SHAPE), dtype=torch.int16)
    caches = {f"layer.{index}": pages[index].view(torch.bfloat16) for index in range(LAYERS)}
    table = read_pages(caches, PAGES, BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS)
    geometry = Geometry(
        slots=CHUNKS,
        ranks=1,
        layers=LAYERS,
        layer_bytes=table.layer_bytes,
        blocks=BLOCKS,
        chunk_tokens=BLOCKS * BLOCK_TOKENS,
    )
    path = folder / "arena"
    with path.open("wb") as file:
        file.truncate(layout.file_bytes(geometry))
        file.seek(0)
        file.write(layout.pack_superblock(geometry, b"f", 1))
    view = ArenaView(path, geometry, 0)
    view.populate()
    transfer = Transfer(CpuCopier(table), Gate(lambda ticket: None))
    transfer.attach(view)
    return Rig(transfer, view, pages)


def pieces(scattered: bool) -> list[Piece]:
    """Every chunk's pages."""
    pages = list(range(PAGES))
    if scattered:
        random.Random(1).shuffle(pages)
    return [
        Piece(slot, 1, 0, tuple(pages[slot * BLOCKS : (slot + 1) * BLOCKS]), KEY, slot)
        for slot in range(CHUNKS)
    ]


def run(options: Options) -> Result:
    """Store and load 16 chunks; ratios of speeds, ours to memcpy's."""
    rows: list[tuple[str, ...]] = []
    goals: list[Goal] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kvist-bench-", dir="/dev/shm") as name:
        rig = make_rig(Path(name))
        for store in (True, False):
            for scattered in (False, True):
                label = f"{'store' if store else 'load'}, {'scattered' if scattered else 'side by side'}"
                ours = _measure(rig, store, pieces(scattered))
                ratio, memcpy, mine = harness.paired_ratio(
                    lambda store=store: rig.memcpy(store),  # type: ignore[misc]
                    ours,
                    options.rounds(40, 5),
                )
                seconds, limit = harness.estimate(mine).median, harness.estimate(memcpy).median
                rows.append(
                    (label, f"{seconds * 1e3:.1f} ms", f"{limit * 1e3:.1f} ms", f"{ratio.median:.2f}")
                )
                goals.append(
                    Goal(
                        f"{label}: share of memcpy's speed",
                        ratio.median,
                        GOAL,
                        at_least=True,
                        interval=(ratio.low, ratio.high),
                    )
                )
                figures[label] = ratio.median
        megabytes = rig.size / 1e6
        rig.transfer.close()
        rig.transfer.attach(None)
    table = Table(
        f"{CHUNKS} chunks, {megabytes:.0f} MB", ("copy", "Kvist", "memcpy", "share of its speed"), tuple(rows)
    )
    worst = min(figures.values())
    return Result(f"copies run at {worst:.0%} of memcpy's speed or better", (table,), figures, tuple(goals))


def _measure(rig: Rig, store: bool, moved: list[Piece]) -> Callable[[], float]:
    act = rig.store if store else rig.load
    act(moved)  # the first copy of a page pays for its faults
    return lambda: act(moved)


if __name__ == "__main__":
    sys.exit(harness.main("copy", run))
