"""Controls that change what is cached: pin, unpin, clear, prefetch, move, compress, decompress.

Called by http.py. Each answers with the chunks, tokens and bytes that it changed (or would change: dry
run), and asking again changes nothing more. A chunk that a running request uses stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvist_connector.agent.catalog import Chunk
from kvist_connector.agent.core import Core
from kvist_connector.agent.lower import LowerTier
from kvist_connector.agent.own import DELETING_SECONDS
from kvist_connector.agent.pins import Pins
from kvist_connector.agent.selection import RequestError, Selector, given, select, typed, with_descendants
from kvist_connector.errors import TierError
from kvist_connector.protocol.tiers import SHARED_TIERS, Tier
from kvist_connector.tiers.coding import Compression
from kvist_connector.tiers.envelope import Header

MAX_PIN_SECONDS = 365 * 86400.0
_DELETED_AT_ONCE = 32
ALL_TIERS = "all"


class PinBody(Selector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of pin; `seconds` until the pin ends by itself."""

    seconds: float = 3600.0
    dry_run: bool = False


class ChangeBody(Selector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of unpin and prefetch."""

    dry_run: bool = False


class ClearBody(Selector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of clear: nothing selected is everything."""

    tier: str = ALL_TIERS
    pinned: bool = False  # pinned chunks too
    dry_run: bool = False


class MoveBody(Selector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of move: to a tier, and away from this agent's others unless it is a copy."""

    to: str
    copy: bool = False
    dry_run: bool = False


class RecodeBody(Selector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of compress and decompress: in one tier below memory, or all of them."""

    tier: str = ALL_TIERS
    dry_run: bool = False


@dataclass
class Removed:
    """What was taken out: copies and their bytes, distinct keys, and what had to stay."""

    copies: int = 0
    size: int = 0
    leased: int = 0
    pinned: int = 0


class Edits:
    """Of one agent."""

    def __init__(self, core: Core, lower: Mapping[Tier, LowerTier], pins: Pins) -> None:
        self._core = core
        self._lower = lower
        self._pins = pins

    @property
    def own(self) -> list[Tier]:
        """The tiers that nobody else reads from or writes to."""
        return [tier for tier in (Tier.MEMORY, *self._lower) if tier not in (*SHARED_TIERS, Tier.PEER)]

    async def pin(self, body: dict[str, Any]) -> dict[str, Any]:
        """Keep chunks from eviction for a time; `missing`: in no own tier, `refused`: found no room."""
        asked = typed(body, PinBody)
        if not 0 < asked.seconds <= MAX_PIN_SECONDS:
            raise RequestError(f"{asked.seconds} is not within 0 to {MAX_PIN_SECONDS:.0f} seconds", "seconds")
        found, own = await self._found(asked), self.own
        # A pin holds what we evict: it would say too much of what only a peer or a shared tier has.
        chunks = [chunk for chunk in found if self._is_in_any(chunk.key, own)]
        missing = len(found) - len(chunks)
        fresh = sum(not self._pins.holds(chunk.key) for chunk in chunks)
        refused = max(0, fresh - self._pins.room)
        if not asked.dry_run:
            chunks = self._pins.pin(chunks, asked.seconds)
        return self._answer(chunks, asked.dry_run, missing=missing, refused=refused)

    async def unpin(self, body: dict[str, Any]) -> dict[str, Any]:
        """End pins."""
        asked = typed(body, ChangeBody)
        keys = [key for key in self._select(asked) if self._pins.holds(key)]
        if not asked.dry_run:
            self._pins.unpin(keys)
        found = [chunk for chunk in map(self._core.catalog.get, keys) if chunk is not None]
        return self._answer(found, asked.dry_run)

    async def prefetch(self, body: dict[str, Any]) -> dict[str, Any]:
        """Bring chunks into memory, in order; `missing` ones could not be had or found no room."""
        asked = typed(body, ChangeBody)
        chunks = await self._found(asked)
        lacking = [chunk for chunk in chunks if chunk.ref is None]
        if asked.dry_run:
            return self._answer(lacking, True, missing=0)
        keys = [chunk.key for chunk in chunks]
        await self._core.loader.bring(keys)
        brought = [chunk for chunk in lacking if self._core.catalog.resident(chunk.key) is not None]
        missing = sum(self._core.catalog.resident(key) is None for key in keys)
        return self._answer(brought, False, missing=missing)

    async def clear(self, body: dict[str, Any]) -> dict[str, Any]:
        """Remove what is neither leased nor pinned; from a shared tier for every agent. Raises TierError."""
        asked = typed(body, ClearBody)
        chosen = self._tiers(asked.tier)
        whole = given(asked) in ("", "all")
        if not whole:
            await self._core.loader.find(self._select(asked))
        keys = self._all(chosen) if whole else with_descendants(self._core.catalog, self._select(asked))
        removed, distinct, shared = Removed(), set(), 0
        for tier in chosen:
            before = removed.copies
            here = [key for key in keys if tier in self._core.catalog.tiers_of(key)]
            distinct.update(here)
            # All at once also catches what is being written just now, and what this agent does not know of.
            if (
                whole
                and not asked.dry_run
                and tier != Tier.MEMORY
                and (tier in SHARED_TIERS or not len(self._pins))
            ):
                with _in_time(tier):
                    copies, size = await self._lower[tier].clear()
                removed.copies, removed.size = removed.copies + copies, removed.size + size
            else:
                await self.remove(tier, here, removed, asked.pinned, asked.dry_run)
            if tier in SHARED_TIERS:
                shared += removed.copies - before
        self._core.room_changed()
        return {
            "chunks": removed.copies,
            "tokens": min(removed.copies, len(distinct)) * self._chunk_tokens,
            "bytes": removed.size,
            "leased": removed.leased,
            "pinned": removed.pinned,
            "shared": shared,
            "dry_run": asked.dry_run,
        }

    async def move(self, body: dict[str, Any]) -> dict[str, Any]:
        """Put chunks into one tier, and out of memory and own disk unless that is it, or a copy is wanted."""
        asked = typed(body, MoveBody)
        target = self._tier(asked.to, "to")
        if target == Tier.PEER:
            raise RequestError(
                "give the name of a replica, to a router: it knows whose memory is meant", "to"
            )
        chunks = await self._found(asked)
        keys = [chunk.key for chunk in chunks]
        lacking = [chunk for chunk in chunks if not self._is_in(chunk.key, target)]
        own = [tier for tier in self.own if tier != target]
        leaving = [] if asked.copy else [chunk for chunk in chunks if self._is_in_any(chunk.key, own)]
        changed = list({chunk.key: chunk for chunk in (*lacking, *leaving)}.values())
        if asked.dry_run:
            return self._answer(changed, True, missing=0, leased=0, pinned=0)
        await self._core.loader.bring([chunk.key for chunk in lacking], copy=True)
        if target != Tier.MEMORY:
            await self._store(target, [chunk.key for chunk in lacking])
        there = [key for key in keys if self._is_in(key, target)]
        removed = Removed()
        if not asked.copy:
            for tier in own:
                here = [key for key in there if self._is_in(key, tier)]
                await self.remove(tier, here, removed, with_pinned=True, dry_run=False)
        self._core.room_changed()
        present = set(there)
        return self._answer(
            [chunk for chunk in changed if chunk.key in present],
            False,
            missing=len(keys) - len(there),
            leased=removed.leased,
            pinned=0,
        )

    async def compress(self, body: dict[str, Any]) -> dict[str, Any]:
        """Store chunks compressed, losslessly, where they lie as they are. Raises TierError."""
        return await self._recode(typed(body, RecodeBody), "zstd")

    async def decompress(self, body: dict[str, Any]) -> dict[str, Any]:
        """Store chunks as they are where they lie compressed. Raises TierError."""
        return await self._recode(typed(body, RecodeBody), "none")

    async def _recode(self, asked: RecodeBody, compression: Compression) -> dict[str, Any]:
        if asked.tier == Tier.MEMORY.label:
            raise RequestError("chunks in memory are never compressed: name a tier below it", "tier")
        tiers = [tier for tier in self._tiers(asked.tier, below=True) if tier not in (Tier.MEMORY, Tier.PEER)]
        done: list[tuple[Chunk, int, int]] = []
        missing = 0
        for chunk in await self._found(asked):
            for tier in tiers:
                header = await self._lower[tier].header(chunk)
                if header is None or (header.codec != "") == (compression != "none"):
                    continue
                sizes: tuple[int, int] | None = header.stored_bytes, header.stored_bytes
                if not asked.dry_run:
                    sizes = await self._recode_one(header, tier, compression)
                    missing += self._core.catalog.resident(chunk.key) is None
                if sizes is not None:
                    done.append((chunk, *sizes))
        self._core.room_changed()
        return self._answer([chunk for chunk, _, _ in done], asked.dry_run) | {
            "bytes": sum(before for _, before, _ in done),
            "bytes_after": sum(after for _, _, after in done),
            "missing": missing,
        }

    async def _recode_one(
        self, header: Header, tier: Tier, compression: Compression
    ) -> tuple[int, int] | None:
        """By way of memory: what is written is what was verified."""
        await self._core.loader.bring([header.key], copy=True)
        chunk = self._core.catalog.resident(header.key)
        if chunk is None:
            return None
        with self._core.memory.held(chunk) as parts:
            return await self._lower[tier].recode(chunk, header, parts, compression)

    async def _store(self, target: Tier, keys: Sequence[bytes]) -> None:
        """Write chunks that are in memory to a lower tier, parents first; stops where that fails."""
        for key in keys:
            chunk = self._core.catalog.resident(key)
            if chunk is None:
                return
            with self._core.memory.held(chunk) as parts:
                stored = await self._lower[target].store(chunk, parts)
            if not stored.there:
                return

    async def remove(
        self, tier: Tier, keys: Sequence[bytes], removed: Removed, with_pinned: bool, dry_run: bool
    ) -> None:
        """Children first. What may not go is counted in `removed`."""
        if tier == Tier.MEMORY:
            self._core.memory.settle_fresh()
        for number, key in enumerate(reversed(keys), start=1):
            if self._pins.holds(key) and not with_pinned:
                removed.pinned += 1
                continue
            size = self._drop(tier, key, removed, dry_run)
            if size is not None:
                removed.copies, removed.size = removed.copies + 1, removed.size + size
            if tier != Tier.MEMORY and number % _DELETED_AT_ONCE == 0:
                await self._deleted(tier)
        if tier != Tier.MEMORY and not dry_run:
            await self._deleted(tier)

    async def _deleted(self, tier: Tier) -> None:
        with _in_time(tier):
            await self._lower[tier].settled(DELETING_SECONDS)

    def _drop(self, tier: Tier, key: bytes, removed: Removed, dry_run: bool) -> int | None:
        """Bytes taken away; None when there was nothing, or it is in use."""
        if tier != Tier.MEMORY:
            node = self._core.catalog.index(tier).get(key)
            if dry_run:
                return node.size if node is not None else None
            return self._lower[tier].drop(key)
        chunk = self._core.catalog.resident(key)
        if chunk is None:
            return None
        if self._core.catalog.is_leased(chunk):
            removed.leased += 1
            return None
        if not dry_run:
            self._core.memory.drop(chunk)
        return self._core.memory.chunk_bytes

    async def _found(self, asked: Selector) -> list[Chunk]:
        """The selected chunks that can be had here, shared tiers asked."""
        keys = self._select(asked)
        await self._core.loader.find(keys)
        return [chunk for chunk in map(self._core.catalog.get, keys) if chunk is not None]

    def _select(self, asked: Selector) -> list[bytes]:
        return select(asked, self._core.catalog, self._core.memory.layout)

    def _all(self, tiers: Iterable[Tier]) -> list[bytes]:
        found = {key for tier in tiers for key in self._core.catalog.keys(tier)}
        chunks = [chunk for chunk in map(self._core.catalog.get, found) if chunk is not None]
        return [chunk.key for chunk in sorted(chunks, key=lambda chunk: chunk.index)]

    def _is_in(self, key: bytes, tier: Tier) -> bool:
        return tier in self._core.catalog.tiers_of(key)

    def _is_in_any(self, key: bytes, tiers: Iterable[Tier]) -> bool:
        return not set(tiers).isdisjoint(self._core.catalog.tiers_of(key))

    def _tiers(self, label: str, below: bool = False) -> list[Tier]:
        if label == ALL_TIERS:
            return [Tier.MEMORY, *self._lower]
        return [self._tier(label, "tier", ALL_TIERS, below=below)]

    def _tier(self, label: str, field: str, *more: str, below: bool = False) -> Tier:
        labels = {tier.label: tier for tier in (Tier.MEMORY, *self._lower)}
        if label not in labels:
            named = (
                name
                for name, tier in labels.items()
                if tier not in (Tier.MEMORY if below else None, Tier.PEER)
            )
            raise RequestError(f"{label!r} is not a tier here; valid: {', '.join((*more, *named))}", field)
        return labels[label]

    @property
    def _chunk_tokens(self) -> int:
        layout = self._core.memory.layout
        return layout.chunk_tokens if layout is not None else 0

    def _answer(self, chunks: Sequence[Chunk], dry_run: bool, **more: int) -> dict[str, Any]:
        return {
            "chunks": len(chunks),
            "tokens": len(chunks) * self._chunk_tokens,
            "bytes": len(chunks) * self._core.memory.chunk_bytes,
            **more,
            "dry_run": dry_run,
        }


@contextmanager
def _in_time(tier: Tier) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TierError(
            f"{tier.label}: no deletion has ended for {DELETING_SECONDS:g} s. What was to go is not served "
            "any more, here or after a restart; ask again to wait for the rest"
        ) from error
