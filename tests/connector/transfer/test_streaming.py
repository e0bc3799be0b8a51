"""Copies past the caches: the same bytes as by numpy, and numpy where they cannot be done."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_connector.arena import geometry as layout
from kvist_connector.protocol.engine import Geometry
from kvist_connector.transfer import streaming
from kvist_connector.transfer.arena_view import ArenaView
from kvist_connector.transfer.cpu import CpuCopier
from kvist_connector.transfer.page_jobs import PageJobs
from kvist_connector.transfer.pages import LayerPages, PageTable
from kvist_connector.transfer.plan import Piece

PAGES, SLOTS = 12, 3
needs_compiler = pytest.mark.skipif(
    streaming.streaming_copy() is None, reason="no llvmlite, or not an x86-64 processor"
)


def made(layers: int, widths: list[int], spare: int) -> PageTable:
    """Pages of random bytes; `spare`: bytes between two pages."""
    generator = torch.Generator().manual_seed(1)

    def part(width: int) -> torch.Tensor:
        whole = torch.randint(0, 256, (PAGES, width + spare), dtype=torch.uint8, generator=generator)
        return whole[:, :width]

    pages = [LayerPages(f"{n}", tuple(map(part, widths))) for n in range(layers)]
    return PageTable(tuple(pages), blocks=2)


def mapped(folder: Path, table: PageTable) -> ArenaView:
    geometry = Geometry(
        slots=SLOTS,
        ranks=1,
        layers=len(table.layers),
        layer_bytes=table.layer_bytes,
        blocks=table.blocks,
        chunk_tokens=8,
    )
    with (folder / "arena").open("wb") as file:
        file.truncate(layout.file_bytes(geometry))
        file.seek(0)
        file.write(layout.pack_superblock(geometry, b"f", 1))
    return ArenaView(folder / "arena", geometry, 0)


def copied(folder: Path, table: PageTable, pieces: list[Piece], limit: int) -> tuple[bytes, list[bytes]]:
    """What the arena holds after a store, and the pages after a load of something else."""
    copier, view = CpuCopier(table, limit), mapped(folder, table)
    copier.attach(view)
    copier.store(pieces, lambda: None)
    stored = view.slots.tobytes()
    view.slots[:] = np.random.default_rng(2).integers(0, 256, view.slots.shape, dtype=np.uint8)
    copier.start_load(pieces)
    for layer in range(len(table.layers)):
        copier.wait_layer(layer)
    copier.finish_load()
    copier.close()
    copier.attach(None)
    return stored, [part.numpy().tobytes() for one in table.layers for part in one.parts]


def pieces_of(pages: list[int], first: int) -> list[Piece]:
    """Slot 0 in part, the last slot whole."""
    return [
        Piece(0, 1, first, tuple(pages[: 2 - first])),
        Piece(SLOTS - 1, 1, 0, tuple(pages[2:4])),
    ]


@given(
    layers=st.integers(1, 3),
    widths=st.lists(st.sampled_from([512, 1024, 4096, 24, 768]), min_size=1, max_size=2),
    spare=st.sampled_from([0, 64, 8]),
    pages=st.permutations(range(PAGES)),
    first=st.integers(0, 1),
)
@settings(max_examples=25)  # each compiles
def test_every_layout_has_the_same_bytes_either_way(tmp_path_factory, layers, widths, spare, pages, first):
    pieces = pieces_of(list(pages), first)
    ways = [
        copied(tmp_path_factory.mktemp("arena"), made(layers, widths, spare), pieces, limit)
        for limit in (0, 1 << 40)
    ]
    assert ways[0] == ways[1]


@needs_compiler
def test_large_copies_stream_where_addresses_allow(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(streaming.StreamingCopy, "__call__", lambda self, jobs: seen.append(jobs.shape))
    copied(tmp_path, made(2, [512, 1024], 64), pieces_of(list(range(PAGES)), 0), 0)
    assert seen == [(2, 8, 3), (8, 3), (8, 3)]  # a store at once, a load by layer
    copied(tmp_path, made(2, [512, 1024], 8), pieces_of(list(range(PAGES)), 0), 0)
    copied(tmp_path, made(2, [512, 1024], 64), pieces_of(list(range(PAGES)), 0), 1 << 20)
    assert len(seen) == 3


@pytest.mark.parametrize(
    "piece",
    [Piece(0, 1, 0, (PAGES,)), Piece(0, 1, 0, (-1,)), Piece(0, 1, 1, (0, 1)), Piece(SLOTS, 1, 0, (0,))],
)
def test_no_address_outside_is_ever_given_out(tmp_path, piece):
    table = made(1, [512], 0)
    view = mapped(tmp_path, table)
    shape = (SLOTS, 1, 2, 512)
    jobs = PageJobs([[part.numpy() for part in table.layers[0].parts]], view.slots.reshape(shape))
    for storing in (True, False):
        with pytest.raises(IndexError):
            jobs.jobs([piece], storing)


def test_layers_in_different_numbers_of_parts_are_copied_by_numpy(tmp_path):
    layers = made(1, [512, 512], 0).layers + made(1, [1024], 0).layers
    table = PageTable(layers, blocks=2)
    expected = b"".join(layers[1].parts[0][page].numpy().tobytes() for page in (0, 1))
    stored, _ = copied(tmp_path, table, pieces_of(list(range(PAGES)), 0), 0)
    assert expected in stored


def test_without_a_compiler_numpy_copies(tmp_path, monkeypatch):
    def absent(name, *more):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    assert streaming.streaming_copy() is None
    stored, _ = copied(tmp_path, made(1, [512], 0), pieces_of(list(range(PAGES)), 0), 0)
    assert stored.startswith(made(1, [512], 0).layers[0].parts[0][0].numpy().tobytes())


@needs_compiler
def test_another_processor_gets_none(monkeypatch):
    monkeypatch.setattr(streaming.platform, "machine", lambda: "aarch64")
    assert streaming.streaming_copy() is None


@needs_compiler
def test_an_engines_worker_may_ask_every_module_for_its_fields():
    # As vLLM does when a worker starts: vars(value).get("kernel") of all that seems to have any.
    values = [
        value
        for name, module in sys.modules.items()
        if name.startswith("llvmlite.binding")
        for value in vars(module).values()
    ]
    assert values
    assert all(isinstance(vars(value), Mapping) for value in values if hasattr(value, "__dict__"))
