"""Index tensors of many pieces against the naive loops they replace."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_connector.transfer.indices import page_rows, region_rows, widest
from kvist_connector.transfer.plan import Piece

BLOCKS = 8


@st.composite
def pieces(draw):
    found = []
    for _ in range(draw(st.integers(1, 6))):
        first = draw(st.integers(0, BLOCKS - 1))
        count = draw(st.integers(1, BLOCKS - first))
        pages = tuple(draw(st.lists(st.integers(0, 500), min_size=count, max_size=count)))
        found.append(Piece(draw(st.integers(0, 50)), 1, first, pages))
    return found


@settings(deadline=None)
@given(pieces(), st.integers(1, 5))
def test_rows_are_where_the_geometry_puts_them(moved, layers):
    region = torch.arange(51 * layers * BLOCKS).view(51, layers, BLOCKS)
    for layer in range(layers):
        wanted = [
            int(region[piece.slot, layer, piece.first_block + i])
            for piece in moved
            for i in range(len(piece.pages))
        ]
        found = region.view(-1)[layer * BLOCKS :][region_rows(moved, layers, BLOCKS)]
        assert found.tolist() == wanted
    assert page_rows(moved).tolist() == [page for piece in moved for page in piece.pages]


@settings(deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]), st.integers(0, 8), st.booleans())
def test_wider_elements_are_the_same_bytes(rows, width, hole, shifted):
    storage = torch.arange(rows * (width + hole) + 8).to(torch.uint8)
    table = storage[int(shifted) :].as_strided((rows, width), (width + hole, 1))
    wide = widest(table)
    assert wide.view(torch.uint8).tolist() == table.tolist()
    assert wide.data_ptr() == table.data_ptr()
    wide[0] = 0
    assert not table[0].any()  # a view, not a copy
