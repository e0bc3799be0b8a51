"""Where the pages of a step's pieces lie, as index tensors: no loop over chunks x layers.

Used by copiers that move a layer of all pieces with one launch. The arena's region is seen
as rows of one page each; a slot's rows are layer after layer, block after block:

    row of (slot, layer, block) = (slot * layers + layer) * blocks + block

so the rows of layer n are those of layer 0 moved by n * blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist_connector.transfer.plan import Piece

_WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)


def page_rows(pieces: Sequence[Piece]) -> torch.Tensor:
    """The engine's page of every copied page, int64."""
    return torch.tensor([page for piece in pieces for page in piece.pages], dtype=torch.int64)


def region_rows(pieces: Sequence[Piece], layers: int, blocks: int) -> torch.Tensor:
    """The region's row of every copied page in layer 0, int64, in the order of `page_rows`."""
    counts = torch.tensor([len(piece.pages) for piece in pieces])
    firsts = torch.tensor([piece.slot * layers * blocks + piece.first_block for piece in pieces])
    ends = torch.cumsum(counts, 0)
    within = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - counts, counts)
    return torch.repeat_interleave(firsts, counts) + within


def widest(table: torch.Tensor) -> torch.Tensor:
    """The same bytes [rows, bytes] in the widest elements that rows and addresses allow."""
    alignment = table.shape[1] | table.stride(0) | table.data_ptr()
    wide = next(dtype for dtype in _WIDE if alignment % dtype.itemsize == 0)
    return table.view(wide) if wide.itemsize > 1 else table
