"""From a request's keys to an Answer: what is resident now, what is worth bringing in, and when.

    lookup -> leading resident chunks leased -> all resident: Answer
                                             -> worth loading: Answer(pending), Load queued
    Load:  wait for slots, all or none, first come first served -> read -> commit -> Answer

A chunk is read once however many requests want it. Reads outlive the request that began
them: a started copy is never revoked, its slot belongs to the reader until the thread is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.lower import LowerTier
from kvist_connector.agent.memory import MemoryTier
from kvist_connector.agent.session import Session
from kvist_connector.keys import split_keys
from kvist_connector.planner import PrefillModel, TierPrice, plan_load
from kvist_connector.protocol.engine import Answer, Lookup, SlotRef
from kvist_connector.protocol.tiers import Tier

log = logging.getLogger(__name__)

# At most this share of the arena is reserved for loads under way; the rest stays for stores and hits.
LOAD_SHARE = 0.5
# And at most this share is kept by leases of requests that wait; beyond it nobody else waits.
WAIT_SHARE = 0.5
MAX_PENDING = 1024
_RESIDENT = TierPrice(latency=0.0, bandwidth=float("inf"))
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(eq=False)
class _Load:
    """A request that waits for lower tiers."""

    session: Session
    request: str
    keys: list[bytes]  # the planned chunks, from the first of the prompt
    known: int
    tiers: list[Tier]  # where each planned chunk was when the request asked
    leased: dict[bytes, Chunk] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Loader:
    """Answers lookups. `spawn` starts a supervised background task."""

    def __init__(
        self,
        memory: MemoryTier,
        catalog: Catalog,
        lower: Mapping[Tier, LowerTier],
        deadline: float,
        clock: Callable[[], float],
        spawn: Spawn,
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._lower = lower
        self._deadline = deadline
        self._clock = clock
        self._spawn = spawn
        self._loads: dict[tuple[Session, str], _Load] = {}
        self._reading: dict[bytes, asyncio.Future[bool]] = {}
        self._turn = asyncio.Lock()  # fair: the order of waiting is the order of service
        self._freed = asyncio.Event()
        self._held: Counter[bytes] = Counter()  # chunks leased by waiting requests, how many times each
        self.counts: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        """Requests that wait for lower tiers."""
        return len(self._loads)

    def is_loading(self, key: bytes) -> bool:
        """Whether a slot is being filled with the chunk."""
        return key in self._reading

    def room_changed(self) -> None:
        """Slots or leases were given back: a waiting load may fit now."""
        self._freed.set()

    def lookup(self, session: Session, message: Lookup, prefill: PrefillModel | None) -> None:
        """Answer now, and again when lower tiers were read."""
        self.release(session, message.request)
        found = self._leading(split_keys(message.keys))
        lead = next((i for i, chunk in enumerate(found) if chunk.ref is None), len(found))
        now = self._clock()
        for chunk in found:
            self._catalog.touch(chunk, now)
        self.counts["chunks_asked"] += len(message.keys) // 16
        self.counts["chunks_hit_memory"] += lead
        if not session.leases.take(message.request, found[:lead]):
            self.counts["lookups_refused"] += 1
            lead = 0
        planned = self._plan(found, lead, prefill, message.local_tokens)
        if planned <= lead:
            self._answer(session, message.request, found[:lead], [Tier.MEMORY] * lead, len(found), False)
            return
        self._answer(session, message.request, found[:lead], [Tier.MEMORY] * lead, len(found), True)
        self._begin(session, message.request, found[:planned], lead, len(found))

    def release(self, session: Session, request: str) -> None:
        """The request is over, or asks anew: its leases end, reads under way go on."""
        load = self._loads.get((session, request))
        if load is not None:
            self._forget(load)
            if load.task is not None:
                load.task.cancel()
        session.leases.release(request)

    def abandon(self, session: Session) -> None:
        """The connection ended."""
        for owner, request in [key for key in self._loads if key[0] is session]:
            self.release(owner, request)

    def _leading(self, keys: Sequence[bytes]) -> list[Chunk]:
        found = []
        for key in keys:
            chunk = self._catalog.get(key)
            if chunk is None:
                break
            found.append(chunk)
        return found

    def _plan(self, found: Sequence[Chunk], lead: int, prefill: PrefillModel | None, local: int) -> int:
        """Leading chunks to have in the arena, of those found."""
        geometry = self._memory.geometry
        if len(found) == lead or geometry is None or not geometry.slots or len(self._loads) >= MAX_PENDING:
            return lead
        if local >= len(found) * geometry.chunk_tokens:
            return lead
        held = len(self._held) + sum(chunk.key not in self._held for chunk in found[:lead])
        if self._loads and held > geometry.slots * WAIT_SHARE:
            self.counts["waits_refused"] += 1
            return lead
        most = max(1, int(geometry.slots * LOAD_SHARE))
        sizes: list[tuple[TierPrice, int]] = []
        for chunk in found[lead:]:
            if chunk.ref is not None:
                sizes.append((_RESIDENT, 0))
                continue
            if most == 0:
                break
            most -= 1
            tier = min(chunk.below)
            sizes.append((self._lower[tier].speed.price, self._memory.chunk_bytes))
        return lead + plan_load(sizes, prefill, geometry.chunk_tokens, lead).chunks

    def _begin(self, session: Session, request: str, planned: Sequence[Chunk], lead: int, known: int) -> None:
        tiers = [Tier.MEMORY if chunk.ref is not None else min(chunk.below) for chunk in planned]
        load = _Load(session, request, [chunk.key for chunk in planned], known, tiers)
        load.leased = {chunk.key: chunk for chunk in planned[:lead]}
        self._held.update(load.leased.keys())
        later = [chunk for chunk in planned[lead:] if chunk.ref is not None]
        self._lease(load, later)
        self._loads[session, request] = load
        load.task = self._spawn(self._run(load))

    async def _run(self, load: _Load) -> None:
        try:
            async with asyncio.timeout(self._deadline):
                await self._reserve(load)
                waiting = [self._reading[key] for key in load.keys if key in self._reading]
                if waiting:
                    await asyncio.wait(waiting)
        except TimeoutError:
            self.counts["loads_late"] += 1
        if self._loads.get((load.session, load.request)) is not load:
            return
        self._lease_resident(load)
        self._forget(load)
        ready = []
        for key in load.keys:
            chunk = load.leased.get(key)
            if chunk is None or chunk.ref is None:
                break
            ready.append(chunk)
        for tier in load.tiers[: len(ready)]:
            self.counts[f"chunks_hit_{tier.label}"] += tier != Tier.MEMORY
        known = load.known if len(ready) == len(load.keys) else self._catalog.known(load.keys)
        self._answer(load.session, load.request, ready, load.tiers[: len(ready)], known, False)

    async def _reserve(self, load: _Load) -> None:
        """Start reading everything the load lacks; returns when all of it is under way."""
        async with self._turn:
            while True:
                missing = self._missing(load)
                refs = self._slots_for(len(missing))
                if refs is not None:
                    for key, ref in zip(missing, refs, strict=True):
                        self._start(key, ref)
                    if missing:
                        self._spawn(self._observe(missing))
                    return
                self._freed.clear()
                await self._freed.wait()

    def _missing(self, load: _Load) -> list[bytes]:
        """Planned keys without slot or reader, up to the first that is nowhere any more."""
        self._lease_resident(load)
        missing = []
        for key in load.keys:
            if key in load.leased or key in self._reading:
                continue
            chunk = self._catalog.get(key)
            if chunk is None or not chunk.below:
                break
            missing.append(key)
        return missing

    def _slots_for(self, count: int) -> list[SlotRef] | None:
        geometry = self._memory.geometry
        most = max(1, int(geometry.slots * LOAD_SHARE)) if geometry is not None else 0
        if count and len(self._reading) + count > max(most, count if not self._reading else 0):
            return None
        return self._memory.allocate(count)

    def _start(self, key: bytes, ref: SlotRef) -> None:
        self._reading[key] = asyncio.get_running_loop().create_future()
        self._spawn(self._read(key, ref))

    async def _read(self, key: bytes, ref: SlotRef) -> None:
        loaded = False
        try:
            chunk = self._catalog.get(key)
            if chunk is not None and chunk.below and self._memory.owns(ref):
                loaded = await self._lower[min(chunk.below)].fetch(key, self._memory.views(ref))
        finally:
            done = self._reading.pop(key)
            current = self._catalog.get(key)
            if loaded and current is not None and current.ref is None and self._memory.owns(ref):
                self._memory.commit(ref, key, current.parent, current.index, current.tags)
                self._lease_to_waiting(key)
            else:
                self._memory.discard(ref)
            if not done.done():
                done.set_result(loaded)
            self.room_changed()

    async def _observe(self, keys: Sequence[bytes]) -> None:
        """Time the batch as a whole: that is what the planner prices."""
        by_tier: dict[Tier, list[asyncio.Future[bool]]] = {}
        for key in keys:
            chunk = self._catalog.get(key)
            if chunk is not None and chunk.below and key in self._reading:
                by_tier.setdefault(min(chunk.below), []).append(self._reading[key])
        start = self._clock()
        for tier, futures in by_tier.items():
            await asyncio.wait(futures)
            size = sum(self._memory.chunk_bytes for future in futures if future.result())
            self._lower[tier].speed.observe(size, self._clock() - start)
            self.counts[f"bytes_loaded_{tier.label}"] += size

    def _lease_to_waiting(self, key: bytes) -> None:
        chunk = self._catalog.resident(key)
        for load in self._loads.values():
            if chunk is not None and key in load.keys:
                self._lease(load, [chunk])

    def _lease_resident(self, load: _Load) -> None:
        chunks = [self._catalog.resident(key) for key in load.keys if key not in load.leased]
        self._lease(load, [chunk for chunk in chunks if chunk is not None])

    def _lease(self, load: _Load, chunks: Sequence[Chunk]) -> None:
        fresh = [chunk for chunk in chunks if chunk.key not in load.leased]
        if fresh and load.session.leases.take(load.request, fresh):
            load.leased.update((chunk.key, chunk) for chunk in fresh)
            self._held.update(chunk.key for chunk in fresh)

    def _forget(self, load: _Load) -> None:
        """The request no longer waits; its leases are its own business from now on."""
        del self._loads[load.session, load.request]
        self._held -= Counter(load.leased.keys())

    def _answer(
        self,
        session: Session,
        request: str,
        chunks: Sequence[Chunk],
        tiers: Sequence[Tier],
        known: int,
        pending: bool,
    ) -> None:
        refs = tuple(chunk.ref for chunk in chunks if chunk.ref is not None)
        session.send(Answer(request=request, refs=refs, tiers=bytes(tiers), known=known, pending=pending))
