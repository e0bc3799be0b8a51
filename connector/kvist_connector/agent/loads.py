"""From a request's keys to an Answer: what is resident now, what is worth bringing in, and when.

    lookup -> leading resident chunks leased -> all resident: Answer
                                             -> shared tiers: Answer(pending), ask them for the rest
                                             -> worth loading: Answer(pending), Load queued
    Load:  wait for slots, all or none, first come first served -> read -> commit -> Answer

A chunk is read once however many requests want it. Reads outlive the request that began
them: a started copy is never revoked, its slot belongs to the reader until the thread is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.finder import Finder
from kvist_connector.agent.lower import LowerTier
from kvist_connector.agent.memory import MemoryTier
from kvist_connector.agent.session import Session
from kvist_connector.agent.touches import Touches
from kvist_connector.keys import split_keys
from kvist_connector.planner import PrefillModel, TierPrice, plan_load
from kvist_connector.protocol.engine import Answer, Lookup, SlotRef
from kvist_connector.protocol.tiers import Tier, preferred
from kvist_connector.tiers.turns import WORKING_FOR

log = logging.getLogger(__name__)

# At most this share of the arena is reserved for loads under way; the rest stays for stores and hits.
LOAD_SHARE = 0.5
# And at most this share is kept by leases of requests that wait; beyond it nobody else waits.
WAIT_SHARE = 0.5
MAX_PENDING = 1024
_BROUGHT_AT_ONCE = 8
_MEMORY = bytes([Tier.MEMORY])
_RESIDENT = TierPrice(latency=0.0, bandwidth=float("inf"))
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(eq=False)
class _Load:
    """A request that waits for lower tiers."""

    session: Session
    request: str
    keys: list[bytes] = field(default_factory=list)  # the planned chunks, from the first of the prompt
    known: int = 0
    tiers: list[Tier] = field(default_factory=list)  # where each planned chunk was when the request asked
    leased: dict[bytes, Chunk] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Loader:
    """Answers lookups. `spawn` starts a supervised background task."""

    def __init__(
        self,
        memory: MemoryTier,
        catalog: Catalog,
        lower: Mapping[Tier, LowerTier],
        finder: Finder,
        deadline: float,
        clock: Callable[[], float],
        spawn: Spawn,
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._lower = lower
        self._finder = finder
        self._deadline = deadline
        self._clock = clock
        self._spawn = spawn
        self._loads: dict[tuple[Session, str], _Load] = {}
        self._reading: dict[bytes, asyncio.Future[bool]] = {}
        self._turn = asyncio.Lock()  # fair: the order of waiting is the order of service
        self._freed = asyncio.Event()
        self._touches = Touches(catalog.touch)
        catalog.settle = self._touches.settle
        self._held: Counter[bytes] = Counter()  # chunks leased by waiting requests, how many times each
        self.counts = finder.counts
        # What the placement adds: room before it is taken, and what becomes of the copy a chunk came from.
        self.make_room: Callable[[int], Awaitable[None]] = _as_it_is
        self.promoted: Callable[[bytes, Tier], None] = lambda key, tier: None

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
        """Answer now, and again when lower tiers were asked and read."""
        keys = split_keys(message.keys)
        found, lead = self._finder.known(keys)
        self._serve(session, message, prefill, keys, found, lead)
        self._touches.add(found, self._clock())

    def _serve(
        self,
        session: Session,
        message: Lookup,
        prefill: PrefillModel | None,
        keys: Sequence[bytes],
        found: Sequence[Chunk],
        lead: int,
    ) -> None:
        self.release(session, message.request)
        self._tag(found, message.tags)
        self.counts["chunks_asked"] += len(keys)
        self.counts["chunks_hit_memory"] += lead
        if not session.leases.take(message.request, found[:lead]):
            self.counts["lookups_refused"] += 1
            lead = 0
        load = _Load(session, message.request)
        if self._worth_asking(message, len(found), len(keys)):
            self._wait(load, found[:lead], self._ask(load, keys, prefill, message))
            self._answer(session, message.request, found[:lead], _MEMORY * lead, len(found), True)
            return
        planned = self._plan(found, lead, prefill, message.local_tokens, not self._loads)
        pending = planned > lead
        self._answer(session, message.request, found[:lead], _MEMORY * lead, len(found), pending)
        if pending:
            self._wait(load, found[:lead], self._run(load))
            self._begin(load, found[:planned], lead, len(found))

    async def find(self, keys: Sequence[bytes]) -> None:
        """Ask shared tiers for what is not sure; the catalog knows the answer afterwards."""
        if self._memory.layout is not None:
            await self._finder.find(keys)

    async def bring(self, keys: Sequence[bytes], *, copy: bool = False) -> int:
        """Read chunks into memory for nobody in particular, in order; how many of them are there then.

        Stops at the first that cannot be had, or when nothing may leave memory for it. `copy`: they stay
        where they are, whatever the placement.
        """
        present = 0
        for start in range(0, len(keys), _BROUGHT_AT_ONCE):
            batch = keys[start : start + _BROUGHT_AT_ONCE]
            async with self._turn:
                await self.make_room(sum(map(self._missing_here, batch)))
                missing = [key for key in batch if self._missing_here(key)]
                refs = self._slots_for(len(missing))
                for key, ref in zip(missing, refs or (), strict=False):
                    self._start(key, ref, copy)
            waiting = [self._reading[key] for key in batch if key in self._reading]
            if waiting:
                await asyncio.wait(waiting)
            here = sum(self._catalog.resident(key) is not None for key in batch)
            present += here
            if here < len(batch):
                break
        return present

    def _missing_here(self, key: bytes) -> bool:
        chunk = self._catalog.get(key)
        return chunk is not None and chunk.ref is None and key not in self._reading

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

    def _tag(self, found: Sequence[Chunk], tags: tuple[str, ...]) -> None:
        if tags:
            for chunk in found:
                self._memory.tag(chunk, tags)

    def _worth_asking(self, message: Lookup, found: int, asked: int) -> bool:
        geometry = self._memory.geometry
        if not self._finder.shared or found == asked or geometry is None or not geometry.slots:
            return False
        return message.local_tokens < asked * geometry.chunk_tokens and len(self._loads) < MAX_PENDING

    async def _ask(
        self, load: _Load, keys: Sequence[bytes], prefill: PrefillModel | None, message: Lookup
    ) -> None:
        """What shared tiers have of the rest; then as for any other lookup."""
        found = await self._finder.find(keys)
        self._tag(found, message.tags)
        lead = next((i for i, chunk in enumerate(found) if chunk.ref is None), len(found))
        self._lease(load, found[:lead])
        planned = self._plan(found, lead, prefill, message.local_tokens, len(self._loads) == 1)
        # What a shared tier has and is not worth loading may be stored here once it is computed.
        known = max(planned, len(self._finder.known(keys)[0]))
        self._begin(load, found[:planned], lead, known)
        await self._run(load)

    def _wait(self, load: _Load, leased: Sequence[Chunk], work: Coroutine[Any, Any, None]) -> None:
        """The request waits from now on, with what it has leased."""
        load.leased = {chunk.key: chunk for chunk in leased}
        self._held.update(load.leased.keys())
        self._loads[load.session, load.request] = load
        load.task = self._spawn(work)

    def _plan(
        self, found: Sequence[Chunk], lead: int, prefill: PrefillModel | None, local: int, alone: bool
    ) -> int:
        """Leading chunks to have in the arena, of those found. `alone`: no other request waits."""
        geometry = self._memory.geometry
        if len(found) == lead or geometry is None or not geometry.slots or len(self._loads) >= MAX_PENDING:
            return lead
        if local >= len(found) * geometry.chunk_tokens:
            return lead
        held = len(self._held) + sum(chunk.key not in self._held for chunk in found[:lead])
        if not alone and held > geometry.slots * WAIT_SHARE:
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
            tier = preferred(chunk.below)[0]
            sizes.append((self._lower[tier].speed.price, self._memory.chunk_bytes))
        planned = lead + plan_load(sizes, prefill, geometry.chunk_tokens, lead).chunks
        if planned < lead + len(sizes):
            self._measure(found[planned])
        return planned

    def _measure(self, chunk: Chunk) -> None:
        """Nobody waits for a tier that is too slow; whether it still is, one of its chunks tells."""
        if chunk.ref is None and self._lower[preferred(chunk.below)[0]].speed.due():
            self._spawn(self._read_alone(chunk.key))

    async def _read_alone(self, key: bytes) -> None:
        async with self._turn:
            await self.make_room(1)
            refs = self._slots_for(1) if self._missing_here(key) else None
            if refs is None:
                return
            self._start(key, refs[0], copy=True)
        await self._observe([key])

    def _begin(self, load: _Load, planned: Sequence[Chunk], lead: int, known: int) -> None:
        load.keys = [chunk.key for chunk in planned]
        load.known = known
        load.tiers = [
            Tier.MEMORY if chunk.ref is not None else preferred(chunk.below)[0] for chunk in planned
        ]
        self._lease(load, [chunk for chunk in planned[lead:] if chunk.ref is not None])

    async def _run(self, load: _Load) -> None:
        WORKING_FOR.set(load)  # this task's, and its reads': loads at the same time share the tier
        try:
            async with asyncio.timeout(self._deadline):
                if self._missing(load):
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
        self._answer(load.session, load.request, ready, bytes(load.tiers[: len(ready)]), known, False)

    async def _reserve(self, load: _Load) -> None:
        """Start reading everything the load lacks; returns when all of it is under way."""
        async with self._turn:
            while True:
                await self.make_room(len(self._missing(load)))
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

    def _start(self, key: bytes, ref: SlotRef, copy: bool = False) -> None:
        self._reading[key] = asyncio.get_running_loop().create_future()
        self._spawn(self._read(key, ref, copy))

    async def _read(self, key: bytes, ref: SlotRef, copy: bool) -> None:
        header, source = None, Tier.MEMORY
        try:
            chunk = self._catalog.get(key)
            for tier in preferred(chunk.below) if chunk is not None else ():
                if header is None and self._memory.owns(ref):
                    header, source = await self._lower[tier].fetch(key, self._memory.views(ref)), tier
        finally:
            done = self._reading.pop(key)
            current = self._catalog.get(key)
            loaded = header is not None and current is not None and current.ref is None
            if header is not None and current is not None and loaded and self._memory.owns(ref):
                self._memory.commit(
                    ref,
                    key,
                    header.parent,
                    current.index,
                    header.tags,
                    header.retire_epoch,
                    header.lossy,
                    loaded=True,
                )
                self._lease_to_waiting(key)
                if not copy:
                    self.promoted(key, source)
            else:
                self._memory.discard(ref)
            if not done.done():
                done.set_result(header is not None)
            self.room_changed()

    async def _observe(self, keys: Sequence[bytes]) -> None:
        """Time the batch as a whole: that is what the planner prices."""
        by_tier: dict[Tier, list[asyncio.Future[bool]]] = {}
        for key in keys:
            chunk = self._catalog.get(key)
            if chunk is not None and chunk.below and key in self._reading:
                by_tier.setdefault(preferred(chunk.below)[0], []).append(self._reading[key])
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
        tiers: bytes,
        known: int,
        pending: bool,
    ) -> None:
        refs = tuple([chunk.ref for chunk in chunks if chunk.ref is not None])
        session.send(Answer(request=request, refs=refs, tiers=tiers, known=known, pending=pending))


async def _as_it_is(count: int) -> None:
    """Room is taken from what may leave."""
