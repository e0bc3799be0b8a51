"""Chunks from one replica to another: what this agent would give, what it takes, what it then lets go.

    source: offer -> target: take, in batches -> target: take (dry run), what is there -> source: release

Driven by the router, which knows both (`move` to a replica), by way of http.py; all on the agent's
loop. Nothing is let go before it was seen at the other side, so whatever breaks off leaves two copies
and never none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from kvist_connector.agent.core import Core
from kvist_connector.agent.edits import Edits, Removed
from kvist_connector.agent.lower import LowerTier
from kvist_connector.agent.peer_settings import peer_url
from kvist_connector.agent.peers import PeerTier
from kvist_connector.agent.selection import RequestError, Selector, parse_key, select, typed, with_descendants
from kvist_connector.errors import TierError
from kvist_connector.protocol.peer import MOST_TAKEN, Offer, Offered, Released, Take, Taken
from kvist_connector.protocol.tiers import Tier


class OfferBody(Selector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of offer."""


class ReleaseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of release: let these go from memory and own disk, as far as nothing needs them here."""

    keys: list[str]


class Handover:
    """Of one agent. `peers`: addresses of the moment; `port`: of the own peer port, 0 while there is
    none; `settled` returns when what was sent from there is not leased any more."""

    def __init__(
        self,
        core: Core,
        lower: Mapping[Tier, LowerTier],
        edits: Edits,
        peers: Callable[[], Collection[str]],
    ) -> None:
        self._peers = peers
        self._core = core
        self._lower = lower
        self.edits = edits
        self.port = 0
        self.settled: Callable[[], Awaitable[None]] = _nothing

    async def offer(self, body: dict[str, Any]) -> Offer:
        """The selected chunks that this agent has to itself, and what hangs on them; parents first."""
        asked = typed(body, OfferBody)
        if not self.port:
            raise TierError(
                "nobody can read from this agent: set peer.host (cache.peers.enabled in a manifest)"
            )
        catalog = self._core.catalog
        keys = with_descendants(catalog, select(asked, catalog, self._core.memory.layout))
        chunks = [chunk for chunk in map(catalog.get, keys) if chunk is not None and self._has(chunk.key)]
        return Offer(
            port=self.port,
            fingerprint=self._fingerprint.hex(),
            chunk_tokens=self._chunk_tokens,
            chunk_bytes=self._core.memory.chunk_bytes,
            chunks=[Offered(chunk.key.hex(), chunk.parent.hex(), chunk.index) for chunk in chunks],
        )

    async def take(self, body: dict[str, Any]) -> Taken:
        """Read from a peer what is not here; `there`: what is here then. Raises TierError."""
        asked = typed(body, Take)
        if len(asked.chunks) > MOST_TAKEN:
            raise RequestError(f"{len(asked.chunks)} are too many: at most {MOST_TAKEN} at a time", "chunks")
        if asked.fingerprint != self._fingerprint.hex():
            raise TierError("the engine here computes otherwise than the source's: its chunks are of no use")
        chunks = [(parse_key(each.key), parse_key(each.parent), each.index) for each in asked.chunks]
        before = {key for key, _, _ in chunks if self._has(key)}
        if not asked.dry_run:
            await self._read(_source(asked.source), [each for each in chunks if each[0] not in before])
        there = [key for key, _, _ in chunks if self._has(key)]
        changed = len(chunks) - len(before) if asked.dry_run else len(there) - len(before)
        return Taken(
            there=[key.hex() for key in there],
            chunks=changed,
            tokens=changed * self._chunk_tokens,
            bytes=changed * self._core.memory.chunk_bytes,
            dry_run=asked.dry_run,
        )

    async def given(self, body: dict[str, Any]) -> Taken:
        """`take`, as a peer that goes asks for it: one of ours, that is, and nobody whom it names."""
        source = _source(typed(body, Take).source)
        if source not in self._peers():
            raise RequestError(f"{source} is none of the peers here: it has to be in peer.urls", "source")
        if self._core.draining:
            raise TierError("this agent goes, too")
        return await self.take(body)

    async def release(self, body: dict[str, Any]) -> Released:
        """Let chunks go; those stay that are leased, pinned, or have others hanging on them."""
        await self.settled()
        keys = self._free_of_children([parse_key(text) for text in typed(body, ReleaseBody).keys])
        removed = Removed()
        for tier in self.edits.own:
            here = [key for key in keys if tier in self._core.catalog.tiers_of(key)]
            await self.edits.remove(tier, here, removed, with_pinned=False, dry_run=False)
        self._core.room_changed()
        gone = sum(not self._has(key) for key in keys)
        return Released(
            chunks=gone,
            tokens=gone * self._chunk_tokens,
            bytes=removed.size,
            leased=removed.leased,
            pinned=removed.pinned,
        )

    async def _read(self, source: str, lacking: Sequence[tuple[bytes, bytes, int]]) -> None:
        peers = self._lower.get(Tier.PEER)
        if not isinstance(peers, PeerTier):
            raise TierError(
                "this agent reads from nobody: set peer.host or peer.urls (cache.peers.enabled in a manifest)"
            )
        wanted = self._reachable(lacking)
        await peers.expect(source, wanted)
        keys = [key for key, _, _ in wanted]
        await self._core.loader.bring(keys, copy=True)
        for key in keys:
            peers.drop(key)
            if self._core.catalog.resident(key) is not None:
                # New here, whatever it was elsewhere: own disk and shared tiers get it as well.
                self._core.hooks.committed(key)

    def _reachable(self, chunks: Sequence[tuple[bytes, bytes, int]]) -> list[tuple[bytes, bytes, int]]:
        """Those whose predecessors are here or come along: without them a chunk is never found."""
        found: dict[bytes, tuple[bytes, bytes, int]] = {}
        for key, parent, index in chunks:
            if index == 0 or parent in found or self._core.catalog.get(parent) is not None:
                found[key] = (key, parent, index)
        return list(found.values())

    def _free_of_children(self, keys: Sequence[bytes]) -> list[bytes]:
        """Known keys on which nothing hangs that stays; parents first."""
        leaving = [key for key in keys if self._core.catalog.get(key) is not None]
        going = set(leaving)
        needed = {
            chunk.parent
            for chunk in self._core.catalog.chunks()
            if chunk.key not in going and self._has(chunk.key)
        }
        free: list[bytes] = []
        for key in reversed(leaving):
            chunk = self._core.catalog.get(key)
            if chunk is not None and key in needed:
                needed.add(chunk.parent)
            elif chunk is not None:
                free.append(key)
        return free[::-1]

    def _has(self, key: bytes) -> bool:
        return any(tier in self.edits.own for tier in self._core.catalog.tiers_of(key))

    @property
    def _chunk_tokens(self) -> int:
        layout = self._core.memory.layout
        return layout.chunk_tokens if layout is not None else 0

    @property
    def _fingerprint(self) -> bytes:
        layout = self._core.memory.layout
        return layout.fingerprint if layout is not None else b""


async def _nothing() -> None:
    """Nothing was sent."""


def _source(url: str) -> str:
    try:
        return peer_url(url)
    except ValueError as error:
        raise RequestError(f"{url!r} is no peer port: {error}", "source") from error
