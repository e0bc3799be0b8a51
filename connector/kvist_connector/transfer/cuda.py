"""Copies between pages in device memory and the arena (CUDA).

The rank's region of the arena is registered with CUDA, piece by piece on the thread that
maps it, so that the device reads and writes slots directly. Per layer one gather and one
scatter with index tensors, whatever the number of chunks (indices.py).

loads    a side stream: slots -> device staging -> pages, an event per layer. The side stream
         first waits for the compute stream (pages may still be read by an earlier step);
         `wait_layer` makes the compute stream wait for the layer's event, never the host.
stores   on the compute stream: pages -> device staging, so that no later step can overtake
         it; then staging -> slots in one launch on a copy stream. A thread waits for the end
         and reports.

Unverified, no device: written without a CUDA device at hand. The conformance tests run
where there is one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvist_connector.errors import UnsupportedError
from kvist_connector.transfer.arena_view import ArenaView
from kvist_connector.transfer.base import PageCopier
from kvist_connector.transfer.indices import page_rows, region_rows, widest
from kvist_connector.transfer.pages import PageTable
from kvist_connector.transfer.pinned import PinnedRegion
from kvist_connector.transfer.plan import Piece

JOIN_TIMEOUT = 60.0  # seconds


@dataclass
class _Load:
    began: torch.cuda.Event
    layers: list[torch.cuda.Event]
    keep: torch.Tensor  # the host's index tensor must outlive its copy


@dataclass
class _Storing:
    ended: torch.cuda.Event
    done: Callable[[], None]
    keep: tuple[torch.Tensor, ...]


class CudaCopier(PageCopier):
    """For engines whose KV pages are in device memory."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._device = table.device
        self._pages = [tuple(widest(part) for part in layer.parts) for layer in table.layers]
        if len({part.dtype for parts in self._pages for part in parts}) > 1:
            self._pages = [layer.parts for layer in table.layers]  # parts of a page are joined: one dtype
        self._load_stream = torch.cuda.Stream(self._device)
        self._store_stream = torch.cuda.Stream(self._device)
        self._pinned: dict[int, PinnedRegion] = {}  # by id of the view; the one in use and the next
        self._rows: torch.Tensor | None = None  # the region, a row per page
        self._load: _Load | None = None
        self._ending: queue.SimpleQueue[_Storing | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._report_ends, name="kvist-store", daemon=True)
        self._thread.start()

    def prepare(self, arena: ArenaView) -> None:
        self._pinned[id(arena)] = PinnedRegion(arena.slots.reshape(-1), self._device)

    def attach(self, arena: ArenaView | None) -> None:
        if arena is None:
            self._rows = None
            return
        if id(arena) not in self._pinned:
            self.prepare(arena)
        rows = self._pinned[id(arena)].device_bytes().view(-1, self._table.page_bytes)
        self._rows = rows.view(self._pages[0][0].dtype)

    def forget(self, arena: ArenaView) -> None:
        if (pinned := self._pinned.pop(id(arena), None)) is not None:
            torch.cuda.synchronize(self._device)
            pinned.release()

    def start_load(self, pieces: Sequence[Piece]) -> None:
        region = self._require_rows()
        blocks = self._table.blocks
        host = torch.stack([page_rows(pieces), region_rows(pieces, len(self._pages), blocks)]).pin_memory()
        self._load_stream.wait_stream(torch.cuda.current_stream(self._device))
        load = _Load(torch.cuda.Event(enable_timing=True), [], host)
        with torch.cuda.stream(self._load_stream):
            load.began.record()
            pages, rows = host.to(self._device, non_blocking=True)
            for index, parts in enumerate(self._pages):
                staged = torch.index_select(region[index * blocks :], 0, rows)
                start = 0
                for part in parts:
                    part.index_copy_(0, pages, staged[:, start : start + part.shape[1]])
                    start += part.shape[1]
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                load.layers.append(event)
        self._load = load

    def wait_layer(self, layer: int) -> None:
        if self._load is not None:
            torch.cuda.current_stream(self._device).wait_event(self._load.layers[layer])

    def finish_load(self) -> float:
        load, self._load = self._load, None
        if load is None:
            return 0.0
        torch.cuda.current_stream(self._device).wait_event(load.layers[-1])
        load.layers[-1].synchronize()
        return float(load.began.elapsed_time(load.layers[-1])) / 1000.0

    def store(self, pieces: Sequence[Piece], done: Callable[[], None]) -> None:
        region = self._require_rows()
        layers, blocks = len(self._pages), self._table.blocks
        host = torch.stack([page_rows(pieces), region_rows(pieces, layers, blocks)]).pin_memory()
        pages, rows = host.to(self._device, non_blocking=True)
        staged = torch.empty(
            (layers, pages.shape[0], region.shape[1]), dtype=region.dtype, device=self._device
        )
        for index, parts in enumerate(self._pages):
            start = 0
            for part in parts:
                staged[index, :, start : start + part.shape[1]] = torch.index_select(part, 0, pages)
                start += part.shape[1]
        moved = rows + blocks * torch.arange(layers, device=self._device).unsqueeze(1)
        self._store_stream.wait_stream(torch.cuda.current_stream(self._device))
        ended = torch.cuda.Event()
        with torch.cuda.stream(self._store_stream):
            region.index_copy_(0, moved.view(-1), staged.view(-1, region.shape[1]))
            ended.record()
        self._ending.put(_Storing(ended, done, (host, moved, staged)))

    def close(self) -> None:
        self._ending.put(None)
        self._thread.join(JOIN_TIMEOUT)
        torch.cuda.synchronize(self._device)
        self._rows = None
        for pinned in self._pinned.values():
            pinned.release()
        self._pinned.clear()

    def _report_ends(self) -> None:
        while (storing := self._ending.get()) is not None:
            storing.ended.synchronize()
            storing.done()

    def _require_rows(self) -> torch.Tensor:
        if self._rows is None:
            raise UnsupportedError("a copy without an arena")  # Transfer copies only with one attached
        return self._rows
