"""A lower tier of the whole cluster: asked by key, never evicted from here, gone without notice.

The catalog's books on it are beliefs: what this agent stored or found there. A lookup asks
again before it relies on them, within the store's deadline for questions; no answer is a miss.
The store drops what it likes (its own eviction, a time to live): a chunk whose parent is gone
is not reached, since a question stops at the first one missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.lower import LowerTier, Presence
from kvist_connector.agent.retired_sweep import sweep
from kvist_connector.agent.rule_keeper import RuleKeeper
from kvist_connector.agent.shared_rules import SharedRules
from kvist_connector.errors import TierError
from kvist_connector.protocol.retired import Retired
from kvist_connector.protocol.tiers import Tier
from kvist_connector.tiers.base import Item
from kvist_connector.tiers.envelope import EnvelopeStore, ForeignChunk

# About a kilobyte each in the catalog; the oldest beliefs go first, the chunks stay where they are.
MAX_KNOWN: Final = 131_072
# A prompt that nobody has seen costs one short question; a long hit a few growing ones.
_FIRST_QUESTION: Final = 8
_GROWTH: Final = 4
_LARGEST_QUESTION: Final = 1024
_CLEARED_AT_ONCE: Final = 32
# Seconds between attempts to clear a store that does not answer.
_RETRY: Final = 5.0
ROOT: Final = bytes(16)


class SharedTier(LowerTier):
    """See module. `chunk_bytes`: of the present layout; `lookup_deadline`: seconds that all questions
    of one lookup may take."""

    def __init__(
        self,
        tier: Tier,
        store: EnvelopeStore,
        catalog: Catalog,
        busy: Busy,
        clock: Callable[[], float],
        chunk_bytes: Callable[[], int],
        lookup_deadline: float,
    ) -> None:
        super().__init__(tier, store, catalog, busy, clock)
        self.lookup_deadline = lookup_deadline
        self.searched = True  # by lookups
        self._chunk_bytes = chunk_bytes
        self._clearing: asyncio.Task[None] | None = None
        self._attempt: asyncio.Future[tuple[int, int]] | None = None  # at clearing, under way or next
        self._keeper: RuleKeeper | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self.learn: Callable[[Retired], Awaitable[None]] = self._learn

    @property
    def closed(self) -> bool:
        """While it is cleared, or has not said what is retired, nothing is served and nothing stored."""
        return self._clearing is not None or (self._keeper is not None and not self._keeper.agreed)

    async def scan(self) -> None:
        """Not listable at an affordable price; whether it answers at all is worth knowing."""
        (answer,) = await self._store.sizes(self._fingerprint, [ROOT])
        if isinstance(answer, Exception):
            self._failed("unreachable", answer)
        elif self._keeper is not None:
            await self._keeper.tried.wait()

    def serve(self, fingerprint: bytes) -> None:
        """Beliefs of another fingerprint are forgotten; the chunks stay for whoever has it."""
        if fingerprint != self._fingerprint:
            self._forget()
            self._keep_rules(fingerprint)
        self._fingerprint = fingerprint

    async def publish(self) -> bool:
        """Every agent that comes to the tier learns what is retired; false when it is to be tried again."""
        if self._keeper is None:
            return True
        try:
            await self._keeper.exchange()
        except TierError as error:
            self._failed("rules_failed", error)
            self._keeper.due()
            return False
        return True

    def owes_rules(self) -> None:
        """More is retired; the tier hears of it soon."""
        if self._keeper is not None:
            self._keeper.due()

    async def reopened(self) -> None:
        """See LowerTier."""
        if self._clearing is not None:
            await asyncio.wait([self._clearing])
        elif self._keeper is not None and not self._keeper.agreed:
            await self._keeper.outcome()

    async def find(self, keys: Sequence[bytes], before: bytes, index: int) -> int:
        """How many leading keys are there now, entered into the catalog.

        `keys` follow the chunk `before` (ROOT when they begin the prompt) at `index`.
        """
        found, size = 0, _FIRST_QUESTION
        if self._keeper is not None:
            await self._keeper.tried.wait()
        era = self._era
        while found < len(keys) and not self.closed:
            batch = keys[found : found + size]
            here = await self._ask(batch)
            if era != self._era or self.closed:
                return 0
            for key in batch[:here]:
                self._enter(key, before, index + found, self._store.stored_at_most(self._chunk_bytes()))
                before, found = key, found + 1
            if here < len(batch):
                break
            size = min(size * _GROWTH, _LARGEST_QUESTION)
        self._bound()
        self.counts["found"] += found
        return found

    def drop_all(self) -> tuple[int, int]:
        """See LowerTier; for every agent that shares the tier. Tried until it works."""
        known = len(self._catalog.keys(self.tier)), self._catalog.index(self.tier).bytes
        self._forget()
        if self._fingerprint and self._clearing is None:
            loop = asyncio.get_running_loop()
            self._attempt = loop.create_future()
            self._clearing = loop.create_task(self._clear_all(self._fingerprint, self._attempt))
            self._clearing.add_done_callback(self._cleared)
        return known

    async def clear(self) -> tuple[int, int]:
        """See LowerTier; raises what made the present attempt fail, others follow."""
        self.drop_all()
        if self._attempt is None:
            return 0, 0
        return await asyncio.shield(self._attempt)

    async def settled(self, patience: float | None = None) -> None:
        """Deletions and clearing under way are done."""
        if self._clearing is not None:
            await asyncio.wait([self._clearing])
        await super().settled(patience)

    async def close(self) -> None:
        """See LowerTier."""
        running = [task for task in (self._clearing, self._keeping, self._sweeping) if task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await super().close()

    async def confirm(self, key: bytes) -> Presence:
        """See LowerTier."""
        (answer,) = await self._store.sizes(self._fingerprint, [key])
        if isinstance(answer, Exception):
            self._failed("ask_failed", answer)
            return Presence.UNKNOWN
        self._answering.worked()
        if answer is None:
            self._catalog.leave_below(self.tier, key)
            return Presence.GONE
        return Presence.THERE

    async def _write(self, chunk: Chunk, parts: Sequence[memoryview], fingerprint: bytes) -> bool:
        written = await self._put(chunk, parts, fingerprint)
        self._bound()
        return written

    async def _room_for(self, chunk: Chunk, size: int) -> None:
        # The server's own affair.
        pass

    def _lost(self, key: bytes) -> None:
        # What cannot be had is worth storing again; should it be there still, nothing is sent twice.
        self._catalog.leave_below(self.tier, key)

    async def _ask(self, keys: Sequence[bytes]) -> int:
        """Leading keys that are there in the size that a chunk may have."""
        raw = self._chunk_bytes()
        self.counts["asked"] += 1
        here: list[bool] = []
        sizes = await self._store.sizes(self._fingerprint, keys)
        if not any(isinstance(size, Exception) for size in sizes):
            self._answering.worked()
        for key, size in zip(keys, sizes, strict=True):
            fits = isinstance(size, int) and self._store.plausible(size, raw)
            here.append(fits)
            if isinstance(size, Exception):
                self._failed("ask_failed", size)
                break
            if size is None:
                self._catalog.leave_below(self.tier, key)
            elif not fits:
                wanted = self._store.stored_at_most(raw)
                self._spoiled(
                    key, ForeignChunk(f"chunk {key.hex()} has {size} bytes, expected at most {wanted}")
                )
        return here.index(False) if False in here else len(keys)

    def _forget(self) -> None:
        self._era += 1
        for key in self._catalog.keys(self.tier):
            self._catalog.leave_below(self.tier, key)

    def _bound(self) -> None:
        while len(self._catalog.index(self.tier)) > MAX_KNOWN:
            victim = self._catalog.victim(self.tier)
            if victim is None:
                return
            self._catalog.leave_below(self.tier, victim.key)

    def _keep_rules(self, fingerprint: bytes) -> None:
        for task in (self._keeping, self._sweeping):
            if task is not None:
                task.cancel()
        rules = SharedRules(self._store.inner, fingerprint, self._next_epoch)
        self._keeper = RuleKeeper(
            rules,
            lambda: self.authority.known,
            lambda retired: self.learn(retired),
            self._in_trouble,
            lambda: self._sweep_soon(fingerprint),
        )
        self._keeping = asyncio.get_running_loop().create_task(self._keeper.run())
        self._keeping.add_done_callback(_heard)

    def _next_epoch(self) -> int:
        return max(int(time.time() * 1000), self.authority.known.epoch + 1)

    async def _learn(self, retired: Retired) -> None:
        self.authority.known = self.authority.known.merge(retired)

    async def _in_trouble(self, error: TierError) -> None:
        self._failed("rules_failed", error)
        await self.asked()

    def _sweep_soon(self, fingerprint: bytes) -> None:
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep_retired(fingerprint))
            self._sweeping.add_done_callback(_heard)

    async def _sweep_retired(self, fingerprint: bytes) -> None:
        async def delete(key: bytes) -> None:
            self._catalog.leave_below(self.tier, key)
            self.counts["swept"] += await self._store.delete(fingerprint, key)

        known = Retired()
        try:
            while known != self.authority.known:
                known = self.authority.known
                await sweep(self._store, fingerprint, self.authority, delete)
        except TierError as error:
            self._failed("sweep_failed", error)

    async def _clear_all(self, fingerprint: bytes, attempt: asyncio.Future[tuple[int, int]]) -> None:
        while True:
            try:
                attempt.set_result(await self._sweep(fingerprint))
            except TierError as error:
                self._failed("clear_failed", error)
                attempt.set_exception(error)
                attempt.exception()  # whoever waits has it, and nobody need wait
                self._attempt = attempt = asyncio.get_running_loop().create_future()
                await asyncio.sleep(_RETRY)
            else:
                self._answering.worked()
                return

    async def _sweep(self, fingerprint: bytes) -> tuple[int, int]:
        chunks = size = 0
        batch: list[Item] = []
        async for item in self._store.objects(fingerprint):
            batch.append(item)
            if len(batch) == _CLEARED_AT_ONCE:
                removed = await self._remove(batch)
                chunks, size = chunks + removed[0], size + removed[1]
                batch.clear()
        removed = await self._remove(batch)
        return chunks + removed[0], size + removed[1]

    async def _remove(self, items: Sequence[Item]) -> tuple[int, int]:
        gone = await asyncio.gather(*(self._store.inner.delete(item.key) for item in items))
        sizes = [item.size for item, removed in zip(items, gone, strict=True) if removed]
        return len(sizes), sum(sizes)

    def _cleared(self, task: asyncio.Task[None]) -> None:
        self._clearing = None
        if self._attempt is not None and not self._attempt.done():
            self._attempt.set_exception(TierError(f"{self.tier.label}: the clearing was given up"))
            self._attempt.exception()  # whoever waits has it, and nobody need wait
        if not task.cancelled():
            task.result()


def _heard(task: asyncio.Task[None]) -> None:
    """A defect of ours ends no agent silently: the loop's handler tells it."""
    if not task.cancelled():
        task.result()
