"""Copies over random layouts against a naive oracle; headers that change; the gate."""

from __future__ import annotations

import random
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_connector.arena import geometry as layout
from kvist_connector.arena.headers import Headers, State
from kvist_connector.engines.vllm.layout import layer_index, read_pages
from kvist_connector.errors import IntegrityError, UnsupportedError
from kvist_connector.protocol.engine import Geometry
from kvist_connector.transfer.arena_view import ArenaView
from kvist_connector.transfer.base import Transfer
from kvist_connector.transfer.cpu import CpuCopier
from kvist_connector.transfer.gate import Gate
from kvist_connector.transfer.plan import Piece

KEY = b"k" * 16
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA: unverified, no device"),
        ],
    ),
]


@dataclass(frozen=True)
class Shape:
    """One engine's KV tensors."""

    layers: int
    pages: int
    blocks: int  # pages of a chunk
    inner: tuple[int, ...]
    split: bool  # K and V in halves of their own
    shared: bool  # all layers in one storage, pages of a block side by side
    permuted: bool
    kernel_blocks: int


shapes = st.builds(
    Shape,
    layers=st.integers(1, 4),
    pages=st.integers(12, 24),
    blocks=st.integers(1, 4),
    inner=st.tuples(st.integers(1, 3), st.integers(2, 5), st.integers(1, 4)),
    split=st.booleans(),
    shared=st.booleans(),
    permuted=st.booleans(),
    kernel_blocks=st.sampled_from([1, 1, 2]),
)


def tensors(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    made = {}
    kernel = 1 if shape.split or shape.shared or shape.permuted else shape.kernel_blocks
    whole = torch.zeros(shape.pages, shape.layers, *shape.inner, dtype=torch.int16, device=device)
    for index in range(shape.layers):
        if shape.split:
            tensor = torch.zeros(2, shape.pages, *shape.inner, dtype=torch.int16, device=device)
        elif shape.shared:
            tensor = whole[:, index]
        else:
            tensor = torch.zeros(shape.pages * kernel, *shape.inner, dtype=torch.int16, device=device)
        made[f"layer.{index}"] = tensor.transpose(-1, -2) if shape.permuted else tensor
    return made


def copier_for(table):
    if table.device.type == "cuda":
        from kvist_connector.transfer.cuda import CudaCopier

        return CudaCopier(table)
    return CpuCopier(table)


class Rig:
    """Tensors, an arena file and a transfer over them."""

    def __init__(
        self, shape: Shape, device: str, folder: Path, slots: int = 5, ranks: int = 1, rank: int = 0
    ):
        self.caches = tensors(shape, device)
        for tensor in self.caches.values():
            tensor.copy_(torch.randint(-30000, 30000, tensor.shape, dtype=torch.int16))
        self.table = read_pages(self.caches, shape.pages, 1, shape.blocks)
        self.geometry = Geometry(
            slots=slots,
            ranks=ranks,
            layers=len(self.table.layers),
            layer_bytes=self.table.layer_bytes,
            blocks=shape.blocks,
            chunk_tokens=shape.blocks,
        )
        self.path = folder / "arena"
        with self.path.open("wb") as file:
            file.truncate(layout.file_bytes(self.geometry))
            file.seek(0)
            file.write(layout.pack_superblock(self.geometry, b"f", 1))
        self.view = ArenaView(self.path, self.geometry, rank)
        self.headers: Headers = self.view.headers
        self.tickets: list[int] = []
        self.gate = Gate(self.tickets.append)
        self.transfer = Transfer(copier_for(self.table), self.gate)
        self.transfer.attach(self.view)

    def close(self):
        self.transfer.close()
        self.folder.cleanup()

    def page(self, page: int) -> list[bytes]:
        """The oracle's view: a page's bytes per layer, element by element."""
        found = []
        for layer in self.table.layers:
            found.append(b"".join(bytes(part[page].tolist()) for part in layer.parts))
        return found

    def fill(self, page: int, value: int) -> None:
        for layer in self.table.layers:
            for part in layer.parts:
                part[page] = value

    def stored(self, pieces):
        self.transfer.store(pieces)
        ended = threading.Event()
        for _ in range(1000):
            if not self.transfer.storing:
                break
            ended.wait(0.01)
        return self.transfer.collect()

    def loaded(self, pieces):
        self.transfer.begin_loads(pieces)
        for layer in range(len(self.table.layers)):
            self.transfer.wait_layer(layer)
        return self.transfer.end_loads()


def make_rig(shape=None, device="cpu", **options):
    shape = shape or Shape(3, 16, 4, (2, 3, 2), False, False, False, 1)
    folder = tempfile.TemporaryDirectory()
    rig = Rig(shape, device, Path(folder.name), **options)
    rig.folder = folder
    return rig


@pytest.fixture
def rig():
    made = make_rig()
    yield made
    made.close()


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 10_000), ranks=st.integers(1, 3))
def test_a_round_trip_is_bit_equal(device, shape, seed, ranks):
    source = random.Random(seed)
    rig = make_rig(shape, device, ranks=ranks, rank=ranks - 1)
    pages = source.sample(range(shape.pages), 3 * shape.blocks)
    chunks = [tuple(pages[i * shape.blocks : (i + 1) * shape.blocks]) for i in range(3)]
    before = {page: rig.page(page) for page in range(shape.pages)}
    slots = source.sample(range(5), 3)
    for slot in slots:
        rig.headers.write(slot, 7, State.RESERVED)
    result = rig.stored([Piece(slot, 7, 0, chunk) for slot, chunk in zip(slots, chunks, strict=True)])
    assert len(result.filled) == 3
    assert not result.unfilled
    for slot in slots:
        rig.headers.write(slot, 7, State.COMMITTED, KEY)

    # Load each chunk from a random block on into other pages; all other pages must not change.
    targets = source.sample(range(shape.pages), 3 * shape.blocks)
    expected = {page: rig.page(page) for page in range(shape.pages)}
    pieces = []
    for number, (slot, chunk) in enumerate(zip(slots, chunks, strict=True)):
        first = source.randrange(shape.blocks)
        count = source.randrange(1, shape.blocks - first + 1)
        into = tuple(targets[number * shape.blocks : number * shape.blocks + count])
        pieces.append(Piece(slot, 7, first, into, KEY))
        expected.update({page: before[chunk[first + i]] for i, page in enumerate(into)})
    assert not rig.loaded(pieces).failed
    assert {page: rig.page(page) for page in range(shape.pages)} == expected
    rig.close()


def test_a_slot_lies_where_the_geometry_says(rig):
    rig.headers.write(2, 1, State.RESERVED)
    rig.stored([Piece(2, 1, 0, (5, 3, 8, 1))])
    start = layout.slot_offset(rig.geometry, 0, 2)
    content = rig.path.read_bytes()[start : start + layout.slot_bytes(rig.geometry)]
    assert content == b"".join(rig.page(page)[layer] for layer in range(3) for page in (5, 3, 8, 1))


@pytest.mark.parametrize(
    ("generation", "state", "key"),
    [
        (8, State.COMMITTED, KEY),
        (7, State.FREE, KEY),
        (7, State.RESERVED, KEY),
        (7, State.COMMITTED, b"x" * 16),
    ],
)
def test_a_slot_that_holds_something_else_is_not_loaded(rig, generation, state, key):
    rig.headers.write(0, generation, state, key)
    before = rig.page(4)
    result = rig.loaded([Piece(0, 7, 0, (4,), KEY)])
    assert [piece.pages for piece in result.failed] == [(4,)]
    assert rig.page(4) == before


def test_a_header_that_changes_during_the_load_fails_it(rig):
    rig.headers.write(0, 7, State.COMMITTED, KEY)
    rig.headers.write(1, 7, State.COMMITTED, KEY)
    rig.transfer.begin_loads([Piece(0, 7, 0, (4,), KEY), Piece(1, 7, 0, (5,), KEY)])
    rig.headers.write(1, 8, State.COMMITTED, KEY)
    assert [piece.slot for piece in rig.transfer.end_loads().failed] == [1]


@pytest.mark.parametrize("state", [State.FREE, State.QUARANTINE, State.COMMITTED])
def test_a_slot_that_is_not_ours_is_not_written(rig, state):
    rig.headers.write(0, 7, state)
    before = rig.path.read_bytes()
    result = rig.stored([Piece(0, 7, 0, (1, 2, 3, 4), ticket=9)])
    assert [piece.ticket for piece in result.unfilled] == [9]
    assert rig.path.read_bytes() == before


def test_without_an_arena_everything_fails_and_nothing_raises(rig):
    rig.transfer.attach(None)
    assert len(rig.loaded([Piece(0, 1, 0, (1,), KEY)]).failed) == 1
    assert len(rig.stored([Piece(0, 1, 0, (1, 2, 3, 4))]).unfilled) == 1


def test_quiesce_waits_for_copies_that_began_before_it(rig):
    rig.headers.write(0, 7, State.COMMITTED, KEY)
    rig.transfer.begin_loads([Piece(0, 7, 0, (4,), KEY)])
    rig.gate.quiesce(1)
    assert rig.tickets == []
    rig.transfer.end_loads()
    assert rig.tickets == [1]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["enter", "leave", "quiesce"]), max_size=60))
def test_every_ticket_is_reported_once_when_its_copies_are_over(moves):
    reported: list[int] = []
    gate = Gate(reported.append)
    inside: list[int] = []
    waiting: dict[int, set[int]] = {}
    expected: list[int] = []
    for number, move in enumerate(moves):
        if move == "enter":
            inside.append(gate.enter())
        elif move == "quiesce":
            waiting[number] = set(inside)
            gate.quiesce(number)
        elif inside:
            left = inside.pop(0)
            gate.leave(left)
            for busy in waiting.values():
                busy.discard(left)
        for ticket in [ticket for ticket, busy in waiting.items() if not busy]:
            del waiting[ticket]
            expected.append(ticket)
        assert reported == expected


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(7, 4), "no leading dimension of 16 blocks"),
        (torch.zeros(16, 4, 8)[:, :, ::2], "has holes between its bytes"),
        (torch.zeros(64, 4)[::2], "do not lie side by side"),
        ("not a tensor", "not a tensor"),
    ],
)
def test_layouts_that_are_not_understood_are_refused_in_words(tensor, words):
    with pytest.raises(UnsupportedError, match=words):
        read_pages({"layer.0": tensor}, 16, 1, 4)


def test_layers_of_different_sizes_are_refused():
    with pytest.raises(UnsupportedError, match="pages of different sizes"):
        read_pages({"a": torch.zeros(16, 4), "b": torch.zeros(16, 8)}, 16, 1, 4)


def test_an_engine_without_layers_is_refused():
    with pytest.raises(UnsupportedError, match="registered no KV layers"):
        read_pages({}, 16, 1, 4)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_kv_space_too_small_to_tell_blocks_from_halves_is_refused(blocks):
    with pytest.raises(UnsupportedError, match=f"a KV space of {blocks} blocks is too small"):
        read_pages({"a": torch.zeros(2, 2, 4)}, blocks, 1, 1)


def test_a_block_size_that_does_not_divide_the_chunk_is_refused():
    with pytest.raises(UnsupportedError, match="not a whole number"):
        read_pages({"a": torch.zeros(16, 4)}, 16, 48, 256)


def test_layers_that_share_their_kv_are_copied_once():
    tensor = torch.zeros(16, 4)
    caches = {"a": tensor, "b": torch.zeros(16, 4), "c": tensor}
    table = read_pages(caches, 16, 1, 4)
    assert [layer.name for layer in table.layers] == ["a", "b"]
    assert layer_index(caches, table) == {"a": 0, "b": 1, "c": 0}


def test_an_arena_of_another_geometry_is_refused(rig):
    other = Geometry(slots=4, ranks=1, layers=3, layer_bytes=96, blocks=4, chunk_tokens=4)
    with pytest.raises(UnsupportedError, match="announced was"):
        ArenaView(rig.path, other, 0)


def test_a_short_arena_is_refused(rig):
    with rig.path.open("r+b") as file:
        file.truncate(layout.file_bytes(rig.geometry) - 1)
    with pytest.raises(IntegrityError, match="its geometry needs"):
        ArenaView(rig.path, rig.geometry, 0)
