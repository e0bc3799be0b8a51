"""Which bytes of pages and slots belong together, as addresses: the jobs of a streaming copy.

Built once for each engine and arena; `jobs` checks what the copy does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvist_connector.transfer.plan import Piece
from kvist_connector.transfer.streaming import Jobs, allowed

Bytes = npt.NDArray[np.uint8]


class PageJobs:
    """`pages[layer][part]` are [pages, bytes]; `slots` is [slots, layers, blocks, bytes of a page]."""

    def __init__(self, pages: Sequence[Sequence[Bytes]], slots: Bytes) -> None:
        self._count = min(part.shape[0] for parts in pages for part in parts)
        self._blocks = slots.shape[2]
        self._slots = slots.shape[0]
        self.possible = len({len(parts) for parts in pages}) == 1
        if not self.possible:
            return
        self._bases = np.array([[part.ctypes.data for part in parts] for parts in pages], dtype=np.int64)
        self._rows = np.array([[part.strides[0] for part in parts] for parts in pages], dtype=np.int64)
        widths = np.array([[part.shape[1] for part in parts] for parts in pages], dtype=np.int64)
        self._widths = widths
        self._strides = np.array(slots.strides[:3], dtype=np.int64)
        layers = slots.ctypes.data + self._strides[1] * np.arange(len(pages), dtype=np.int64)
        self._places = layers[:, None] + np.cumsum(widths, axis=1) - widths
        steps = np.concatenate([self._rows.ravel(), self._strides])
        self.possible = allowed(np.concatenate([self._bases.ravel(), self._places.ravel(), steps]), widths)

    def jobs(self, pieces: Sequence[Piece], storing: bool) -> Jobs:
        """[layers, jobs of a layer, 3]; IndexError for pages, blocks or slots that there are not."""
        pages = np.array([page for piece in pieces for page in piece.pages], dtype=np.int64)
        if pages.size and (pages.min() < 0 or pages.max() >= self._count):
            raise IndexError(f"a page is outside the engine's {self._count}")
        page = self._bases[:, :, None] + self._rows[:, :, None] * pages
        slot = self._places[:, :, None] + self._within(pieces)
        width = np.broadcast_to(self._widths[:, :, None], page.shape)
        table = np.stack((slot, page, width) if storing else (page, slot, width), axis=-1)
        found: Jobs = table.reshape(len(self._bases), -1, 3)
        return found

    def _within(self, pieces: Sequence[Piece]) -> npt.NDArray[np.int64]:
        """Where each page's block lies, from the first block of the first slot."""
        counts = [len(piece.pages) for piece in pieces]
        for piece, count in zip(pieces, counts, strict=True):
            whole = 0 <= piece.first_block <= self._blocks - count
            if not (whole and 0 <= piece.slot < self._slots):
                raise IndexError(f"slot {piece.slot} of {self._slots} has no blocks {piece.first_block}..")
        firsts = [piece.slot * self._strides[0] + piece.first_block * self._strides[2] for piece in pieces]
        steps = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        found: npt.NDArray[np.int64] = np.repeat(np.array(firsts, dtype=np.int64), counts)
        found += self._strides[2] * steps
        return found
