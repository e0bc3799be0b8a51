"""The worker half: copies what the step's plan says between the engine's pages and the arena.

Hooks run on the worker's thread; the agent's messages come on the client's thread, which
answers quiesce tickets at once. A third thread populates and pins a new arena, which takes
seconds when it is large. A mapping is changed only at the start of a step, with no copy
under way.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from kvist_connector.arena.locks import MemberLock
from kvist_connector.engines.agent_client import AgentClient, ClientTimes
from kvist_connector.engines.vllm.config import EngineConfig
from kvist_connector.engines.vllm.metadata import StepPlan, StepReport
from kvist_connector.errors import KvistError
from kvist_connector.protocol.engine import (
    PROTOCOL_VERSION,
    Arena,
    Hello,
    Layout,
    Quiesce,
    Quiesced,
    Register,
    ToAgent,
    ToEngine,
    Welcome,
)
from kvist_connector.transfer.arena_view import ArenaView
from kvist_connector.transfer.base import LoadResult, PageCopier, Transfer
from kvist_connector.transfer.gate import Gate

logger = logging.getLogger(__name__)
JOIN_TIMEOUT = 60.0  # seconds that pinning a large arena may go on when the engine stops


class WorkerHalf:
    """One per rank. `register` once, then the hooks of each step, then `close`."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        socket: Path,
        times: ClientTimes | None = None,
        revive: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._member = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._layout: Layout | None = None
        self._gate = Gate(self._quiesced)
        self._client = AgentClient(socket, self._greeting, self, f"worker-{rank}", times, revive)
        self._transfer: Transfer | None = None
        self._layers: dict[str, int] = {}
        self._lock = threading.Lock()
        self._locks: dict[Path, MemberLock] = {}
        self._latest: ArenaView | None = None  # the one announced last, unless it was refused
        self._arenas: queue.SimpleQueue[ArenaView | None] = queue.SimpleQueue()
        self._arena_thread = threading.Thread(target=self._take_all, name=f"kvist-arena-{rank}", daemon=True)
        self._next: ArenaView | None = None  # mapped, to be used from the next step on
        self._current: ArenaView | None = None
        self._loads_open = False
        self._failed_pages: set[int] = set()
        self._failed_keys: set[bytes] = set()
        self._load_seconds = 0.0

    def register(self, copier: PageCopier, layers: dict[str, int], layout: Layout) -> None:
        """The engine's pages are known: connect."""
        self._transfer = Transfer(copier, self._gate)
        self._layers = layers
        self._layout = layout
        self._arena_thread.start()
        self._client.start()

    def close(self) -> None:
        """Copies end, the agent sees the member go."""
        self._client.close()
        self._arenas.put(None)
        if self._arena_thread.is_alive():
            self._arena_thread.join(JOIN_TIMEOUT)
        if self._transfer is not None:
            self._transfer.close()
            self._transfer.attach(None)
            if self._next is not None:
                self._transfer.discard(self._next)
        self._current = self._next = None
        for lock in self._locks.values():
            lock.close()

    @property
    def ready(self) -> bool:
        """Whether an arena is mapped, for this step or the next."""
        return self._next is not None or self._current is not None

    # ---- hooks of a step, in this order

    def begin_step(self) -> None:
        """Take over a newly announced arena, if no copy into the old one is under way."""
        if self._next is None or self._transfer is None or self._transfer.storing:
            return
        with self._lock:
            view, self._next = self._next, None
        self._transfer.attach(view)
        self._current = view

    def start_loads(self, plan: StepPlan, overlap: bool) -> None:
        """Begin the loads; without overlap all layers are ordered before the forward pass."""
        if not plan.loads or self._transfer is None:
            return
        self._loads_open = True
        self._transfer.begin_loads(plan.loads)
        if not overlap:
            for layer in range(len(self._layers)):
                self._transfer.wait_layer(layer)

    def wait_layer(self, name: str) -> None:
        """The layer's loaded pages are in place for what the engine computes next."""
        if self._loads_open and self._transfer is not None and name in self._layers:
            self._transfer.wait_layer(self._layers[name])

    def save(self, plan: StepPlan) -> None:
        """Gather finished chunks into their slots."""
        self._end_loads()
        if not plan.stores or self._transfer is None:
            return
        usable = self._current is not None and self._current.epoch == plan.epoch
        self._transfer.store(plan.stores) if usable else self._transfer.refuse(plan.stores)

    def failed_pages(self) -> set[int]:
        """Pages that were to be loaded and were not. Raises where a step that used them may be under way."""
        self._end_loads()
        failed, self._failed_pages = self._failed_pages, set()
        if failed and self._config.overlapping_steps:
            raise KvistError(
                f"{len(failed)} KV pages could not be loaded while steps overlap: a later step may have "
                "used them; the engine must restart rather than answer wrongly"
            )
        return failed

    def report(self, plan: StepPlan) -> StepReport | None:
        """What the scheduler half learns of the step."""
        self._end_loads()
        if self._transfer is None:
            return StepReport(plan.step) if plan.report else None
        ended = self._transfer.collect()
        if not (plan.report or ended.filled or ended.unfilled):
            return None
        keys, self._failed_keys = frozenset(self._failed_keys), set()
        seconds, self._load_seconds = self._load_seconds, 0.0
        return StepReport(
            step=plan.step,
            filled=Counter(piece.ticket for piece in ended.filled),
            unfilled=Counter(piece.ticket for piece in ended.unfilled),
            failed_keys=keys,
            load_seconds=seconds,
        )

    def _end_loads(self) -> None:
        if not self._loads_open or self._transfer is None:
            return
        self._loads_open = False
        result: LoadResult = self._transfer.end_loads()
        self._load_seconds += result.seconds
        for piece in result.failed:
            self._failed_pages.update(piece.pages)
            if self._current is not None:
                self._failed_keys.add(piece.key)
        if result.failed:
            logger.warning("%d chunks could not be loaded and are recomputed", len(result.failed))

    # ---- on the client's thread

    def _greeting(self) -> Sequence[ToAgent]:
        assert self._layout is not None
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            role="worker",
            engine=self._config.engine,
            member=self._member,
            rank=self._rank,
            pid=os.getpid(),
        )
        return (hello, Register(layout=self._layout))

    def opened(self, welcome: Welcome) -> None:
        """Nothing to do: the arena, if any, follows."""

    def received(self, message: ToEngine) -> None:
        if isinstance(message, Quiesce):
            self._gate.quiesce(message.ticket)
        elif isinstance(message, Arena):
            self._prepare(message)

    def closed(self, reason: str) -> None:
        self._gate.forget_tickets()

    def _quiesced(self, ticket: int) -> None:
        self._client.send(Quiesced(ticket=ticket))

    def _prepare(self, arena: Arena) -> None:
        """Lock and map; the arena thread does the rest."""
        if arena.geometry.slots == 0 or not arena.path:
            return  # the agent keeps an index only
        path = Path(arena.path)
        try:
            if path not in self._locks:
                self._locks[path] = MemberLock(path, self._member)
            view = ArenaView(path, arena.geometry, self._rank, arena.epoch)
        except (OSError, KvistError) as error:
            logger.error("Kvist arena %s cannot be used, serving uncached: %s", path, error)
            return
        known = self._latest
        if known is not None and (known.identity, known.geometry) == (view.identity, view.geometry):
            view.close()  # the agent came back and kept the file
            known.epoch = arena.epoch
            return
        self._latest = view
        self._arenas.put(view)

    # ---- on the arena thread

    def _take_all(self) -> None:
        while (view := self._arenas.get()) is not None:
            self._take(view)

    def _take(self, view: ArenaView) -> None:
        """Populate and pin; the next step takes it over."""
        assert self._transfer is not None
        view.populate()
        try:
            self._transfer.prepare(view)
        except KvistError as error:
            logger.error("Kvist arena %s cannot be used, serving uncached: %s", view.path, error)
            if self._latest is view:
                self._latest = None
            view.close()
            return
        with self._lock:
            replaced, self._next = self._next, view
        if replaced is not None:
            self._transfer.discard(replaced)
