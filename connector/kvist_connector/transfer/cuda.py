"""Copies between pages in device memory and the arena (CUDA).

The rank's region of the arena is registered with CUDA, piece by piece in the background,
so that the device reads and writes slots directly. Per layer one gather and one scatter
with index tensors, whatever the number of chunks.

loads    a side stream: slots -> device staging -> pages, an event per layer. The side stream
         first waits for the compute stream (pages may still be read by an earlier step);
         `wait_layer` makes the compute stream wait for the layer's event, never the host.
stores   on the compute stream: pages -> device staging, so that no later step can overtake
         it; then staging -> slot on a copy stream. A thread waits for the end and reports.

Not verified here: no CUDA device. The conformance tests run where there is one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvist_connector.errors import UnsupportedError
from kvist_connector.transfer.arena_view import ArenaView
from kvist_connector.transfer.base import PageCopier
from kvist_connector.transfer.pages import PageTable
from kvist_connector.transfer.plan import Piece

REGISTER_BYTES = 256 * 1024 * 1024
JOIN_TIMEOUT = 60.0  # seconds


@dataclass
class _Load:
    began: torch.cuda.Event
    layers: list[torch.cuda.Event]
    keep: list[torch.Tensor]  # staging must outlive the copies


@dataclass
class _Storing:
    ended: torch.cuda.Event
    done: Callable[[], None]
    keep: list[torch.Tensor]


class CudaCopier(PageCopier):
    """For engines whose KV pages are in device memory."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._device = table.device
        self._load_stream = torch.cuda.Stream(self._device)
        self._store_stream = torch.cuda.Stream(self._device)
        self._region: torch.Tensor | None = None
        self._registered: list[int] = []
        self._load: _Load | None = None
        self._ending: queue.SimpleQueue[_Storing | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._report_ends, name="kvist-store", daemon=True)
        self._thread.start()

    def attach(self, arena: ArenaView | None) -> None:
        self._unregister()
        self._region = None
        if arena is None:
            return
        g = arena.geometry
        shape = (g.slots, g.layers, g.blocks, g.layer_bytes // g.blocks)
        self._region = torch.from_numpy(arena.slots.reshape(shape))
        self._register(self._region)

    def start_load(self, pieces: Sequence[Piece]) -> None:
        region = self._require_region()
        pages, slots, blocks = self._indices(pieces)
        self._load_stream.wait_stream(torch.cuda.current_stream(self._device))
        load = _Load(torch.cuda.Event(enable_timing=True), [], [])
        with torch.cuda.stream(self._load_stream):
            load.began.record()
            rows = pages.to(self._device, non_blocking=True)
            for index, layer in enumerate(self._table.layers):
                host = torch.empty((len(slots), self._table.page_bytes), dtype=torch.uint8, pin_memory=True)
                torch.index_select(
                    region[:, index].reshape(-1, self._table.page_bytes),
                    0,
                    slots * self._table.blocks + blocks,
                    out=host,
                )
                staged = host.to(self._device, non_blocking=True)
                start = 0
                for part in layer.parts:
                    part.index_copy_(0, rows, staged[:, start : start + part.shape[1]])
                    start += part.shape[1]
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                load.layers.append(event)
                load.keep += [host, staged]
            load.keep.append(rows)
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
        region = self._require_region()
        pages, _, _ = self._indices(pieces)
        rows = pages.to(self._device, non_blocking=True)
        shape = (len(self._table.layers), len(rows), self._table.page_bytes)
        staged = torch.empty(shape, dtype=torch.uint8, device=self._device)
        for index, layer in enumerate(self._table.layers):
            parts = [torch.index_select(part, 0, rows) for part in layer.parts]
            torch.cat(parts, dim=1, out=staged[index])
        per_chunk = (
            staged.view(shape[0], len(pieces), self._table.blocks, shape[2]).transpose(0, 1).contiguous()
        )
        self._store_stream.wait_stream(torch.cuda.current_stream(self._device))
        ended = torch.cuda.Event()
        with torch.cuda.stream(self._store_stream):
            for position, piece in enumerate(pieces):
                region[piece.slot].copy_(per_chunk[position], non_blocking=True)
            ended.record()
        self._ending.put(_Storing(ended, done, [staged, per_chunk, rows]))

    def close(self) -> None:
        self._ending.put(None)
        self._thread.join(JOIN_TIMEOUT)
        torch.cuda.synchronize(self._device)
        self._unregister()

    def _report_ends(self) -> None:
        while (storing := self._ending.get()) is not None:
            storing.ended.synchronize()
            storing.done()

    def _require_region(self) -> torch.Tensor:
        assert self._region is not None  # Transfer copies only with an arena attached
        return self._region

    def _indices(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Page, slot and block of every copied page, as index tensors."""
        pages = np.fromiter((page for piece in pieces for page in piece.pages), dtype=np.int64)
        slots = np.repeat([piece.slot for piece in pieces], [len(piece.pages) for piece in pieces])
        blocks = np.concatenate([piece.first_block + np.arange(len(piece.pages)) for piece in pieces])
        return torch.from_numpy(pages), torch.from_numpy(slots), torch.from_numpy(blocks)

    def _register(self, region: torch.Tensor) -> None:
        """Pin the mapping; transfers from unregistered memory would be staged and synchronous."""
        start, length = region.data_ptr(), region.numel()
        runtime = torch.cuda.cudart()
        for offset in range(0, length, REGISTER_BYTES):
            error = runtime.cudaHostRegister(start + offset, min(REGISTER_BYTES, length - offset), 0)
            if int(error) != 0:
                self._unregister()
                raise UnsupportedError(
                    f"the arena cannot be pinned for the device (CUDA error {int(error)}): raise the limit of "
                    "locked memory (ulimit -l, or the pod's) or make the arena smaller"
                )
            self._registered.append(start + offset)

    def _unregister(self) -> None:
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
