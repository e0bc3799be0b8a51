"""Copies between the engine's pages and arena slots: the interface and what every copier shares.

`Transfer` is what the worker half calls. It checks slot headers before and after every
copy, passes the gate and reports; a `PageCopier` (cpu.py, cuda.py) only moves bytes.

Order within a step, all on the worker's thread:
    begin_loads -> wait_layer(0..n) -> end_loads -> store -> collect
Invariant: after `end_loads` no page is written any more, after `store` no page is read
any more (on CUDA: nothing that the compute stream runs later can be overtaken).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvist_connector.transfer.arena_view import ArenaView
from kvist_connector.transfer.gate import Gate
from kvist_connector.transfer.plan import Piece


class PageCopier(ABC):
    """Moves whole pages as raw bytes for one rank; knows its page tensors, not headers."""

    def prepare(self, arena: ArenaView) -> None:  # noqa: B027 - most have nothing to do
        """Slow work before `attach` (pinning), on any thread, with copies of another arena under way.

        Raises UnsupportedError when the arena cannot be used.
        """

    @abstractmethod
    def attach(self, arena: ArenaView | None) -> None:
        """Use this arena from now on; called with no copy under way."""

    def forget(self, arena: ArenaView) -> None:  # noqa: B027 - most have nothing to do
        """Undo `prepare`; the arena is not attached any more and about to be unmapped."""

    @abstractmethod
    def start_load(self, pieces: Sequence[Piece]) -> None:
        """Begin copying slots to pages, layer 0 first."""

    @abstractmethod
    def wait_layer(self, layer: int) -> None:
        """Whatever the engine computes after this call sees the loaded pages of `layer`."""

    @abstractmethod
    def finish_load(self) -> float:
        """Return when every byte of the started load has arrived: seconds spent copying.

        Raises what the copy raised.
        """

    @abstractmethod
    def store(self, pieces: Sequence[Piece], done: Callable[[], None]) -> None:
        """Copy pages to slots. Pages are not read after return; `done` is called when the
        slots hold all bytes, from any thread, now or later."""

    @abstractmethod
    def close(self) -> None:
        """Wait for copies under way, then stop."""


@dataclass
class LoadResult:
    """What a step's loads came to."""

    failed: list[Piece] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class StoreResult:
    """Stores that ended since the last collect."""

    filled: list[Piece] = field(default_factory=list)
    unfilled: list[Piece] = field(default_factory=list)


class Transfer:
    """Header checks, gate and results around one copier. One step at a time."""

    def __init__(self, copier: PageCopier, gate: Gate) -> None:
        self._copier = copier
        self._gate = gate
        self._arena: ArenaView | None = None
        self._loading: list[Piece] = []
        self._result = LoadResult()
        self._ticket = 0
        self._lock = threading.Lock()
        self._ended = StoreResult()
        self._storing: set[int] = set()

    def prepare(self, arena: ArenaView) -> None:
        """Make ready for `attach`, on any thread."""
        self._copier.prepare(arena)

    def attach(self, arena: ArenaView | None) -> None:
        """Change the arena between steps; the one used before is unmapped."""
        before, self._arena = self._arena, arena
        self._copier.attach(arena)
        if before is not None:
            self.discard(before)

    def discard(self, arena: ArenaView) -> None:
        """Unmap an arena that is not attached."""
        self._copier.forget(arena)
        arena.close()

    @property
    def storing(self) -> bool:
        """Whether a store has not ended; the arena must not change before."""
        with self._lock:
            return bool(self._storing)

    def begin_loads(self, pieces: Sequence[Piece]) -> None:
        """Check headers and begin copying what is still there."""
        self._result = LoadResult()
        self._ticket = self._gate.enter()
        arena = self._arena
        for piece in pieces:
            good = arena is not None and arena.committed(piece)
            (self._loading if good else self._result.failed).append(piece)
        if self._loading:
            self._copier.start_load(self._loading)

    def wait_layer(self, layer: int) -> None:
        """Order what the engine computes next after the load of this layer."""
        if self._loading:
            self._copier.wait_layer(layer)

    def end_loads(self) -> LoadResult:
        """All loads are over; pieces whose slot changed meanwhile count as failed."""
        pieces, self._loading = self._loading, []
        result, self._result = self._result, LoadResult()
        if pieces:
            result.seconds = self._copier.finish_load()
            arena = self._arena
            result.failed += [p for p in pieces if arena is None or not arena.committed(p)]
        self._gate.leave(self._ticket)
        return result

    def store(self, pieces: Sequence[Piece]) -> None:
        """Copy pages into slots that are still ours."""
        arena = self._arena
        ticket = self._gate.enter()
        good: list[Piece] = []
        refused: list[Piece] = []
        for piece in pieces:
            (good if arena is not None and arena.reserved(piece) else refused).append(piece)
        with self._lock:
            self._ended.unfilled += refused
            if good:
                self._storing.add(ticket)
        if not good or arena is None:
            self._gate.leave(ticket)
            return
        self._copier.store(good, lambda: self._stored(good, arena, ticket))

    def refuse(self, pieces: Sequence[Piece]) -> None:
        """Report stores as unfilled without touching a slot."""
        with self._lock:
            self._ended.unfilled += pieces

    def collect(self) -> StoreResult:
        """Stores that ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, StoreResult()
        return ended

    def close(self) -> None:
        """Wait for copies under way."""
        self._copier.close()
        self._gate.leave(self._ticket)

    def _stored(self, pieces: list[Piece], arena: ArenaView, ticket: int) -> None:
        """The bytes are in the slots: the second check decides which count, then the gate opens."""
        with self._lock:
            for piece in pieces:
                (self._ended.filled if arena.reserved(piece) else self._ended.unfilled).append(piece)
            self._storing.discard(ticket)
        self._gate.leave(ticket)
