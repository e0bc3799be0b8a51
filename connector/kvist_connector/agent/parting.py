"""What a draining replica leaves to its peers, where no shared tier outlives it.

    most valuable chunks, parents first -> each chain to one peer -> "take these from me" -> it reads them

Copies: nothing is let go here. A peer evicts for it what it thinks least of, so none is asked to take
more than a share of what this arena holds. Called by drain.py, on the agent's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import xxhash

from kvist_connector.agent.catalog import Chunk
from kvist_connector.agent.core import Core
from kvist_connector.errors import TierError
from kvist_connector.protocol.peer import Offered, Take, Taken
from kvist_connector.protocol.tiers import SHARED_TIERS, Tier
from kvist_connector.tiers.peer import Transfer

log = logging.getLogger(__name__)
# Of the arena's slots, for each peer.
SHARE: Final = 0.25
_BATCH: Final = 32
# Of one batch; a drain has a deadline of its own for all of them.
_SECONDS: Final = 30.0


@dataclass
class Parting:
    """Of one agent. `peers`: of the moment, `connect` opens one; `address`: its peer port as others know
    it, None: they do not."""

    core: Core
    peers: Callable[[], Sequence[str]]
    connect: Callable[[str], Transfer]
    address: str | None
    pending: int = 0  # chunks that are to be given
    _given: dict[str, set[bytes]] = field(default_factory=dict)  # by peer

    @property
    def possible(self) -> bool:
        """Whether there is anybody to give to, and need to."""
        shared = any(tier in SHARED_TIERS for tier in self.core.catalog.lower)
        return self.address is not None and bool(self.peers()) and not shared

    async def run(self) -> None:
        """Give what was not given yet; ends when that is done, or the drain is taken back."""
        if not self.possible or self.core.memory.layout is None:
            return
        peers = list(self.peers())
        while peers:
            shares = self._shares(peers)
            self.pending = sum(map(len, shares.values()))
            took = await asyncio.gather(*(self._give(peer, chunks) for peer, chunks in shares.items()))
            # What one does not take is the others'.
            peers = [] if all(took) else [peer for peer, done in zip(shares, took, strict=True) if done]

    def _shares(self, peers: Sequence[str]) -> dict[str, list[Chunk]]:
        """Which peer is to have which chunks, the most valuable first and what they hang on before them."""
        slots = self.core.memory.slots
        most = max(1, int((slots.size if slots is not None else 0) * SHARE))
        memory = self.core.catalog.order(Tier.MEMORY)
        shares: dict[str, list[Chunk]] = {peer: [] for peer in peers}
        room = {peer: most - len(self._given.get(peer, ())) for peer in peers}
        chosen = {key for given in self._given.values() for key in given}
        roots: dict[bytes, bytes | None] = {}
        for key in sorted(memory.keys(), key=memory.worth, reverse=True):
            root = self._root(key, roots)
            peer = _peer(peers, root) if root is not None else ""
            if not room.get(peer):
                continue
            fresh = self._fresh(key, chosen, room[peer])
            # A share ends with the first chain that does not fit: what follows is worth less.
            room[peer] = 0 if fresh is None else room[peer] - len(fresh)
            shares[peer] += fresh or []
            chosen.update(chunk.key for chunk in fresh or ())
        return shares

    def _root(self, key: bytes, roots: dict[bytes, bytes | None]) -> bytes | None:
        """The first chunk of a chain; None when a part is not in memory. Each chunk is looked at once."""
        path: list[bytes] = []
        while key not in roots:
            chunk = self.core.catalog.resident(key)
            if chunk is None or chunk.index == 0:
                roots[key] = None if chunk is None else key
            else:
                path.append(key)
                key = chunk.parent
        roots |= dict.fromkeys(path, roots[key])
        return roots[key]

    def _fresh(self, key: bytes, chosen: Container[bytes], room: int) -> list[Chunk] | None:
        """The chunk and those before it that are not chosen yet, first ones first; None without room."""
        chain: list[Chunk] = []
        while key not in chosen:
            chunk = self.core.catalog.resident(key)
            if chunk is None or len(chain) == room:
                return None
            chain.append(chunk)
            if chunk.index == 0:
                break
            key = chunk.parent
        return chain[::-1]

    async def _give(self, peer: str, chunks: Sequence[Chunk]) -> bool:
        """False when the peer does not take all of it."""
        transfer = self.connect(peer)
        try:
            return await self._give_by(transfer, peer, chunks)
        finally:
            await transfer.close()

    async def _give_by(self, transfer: Transfer, peer: str, chunks: Sequence[Chunk]) -> bool:
        for start in range(0, len(chunks), _BATCH):
            batch = chunks[start : start + _BATCH]
            if not self.core.draining:
                return True
            try:
                async with asyncio.timeout(_SECONDS):
                    there = await self._ask(transfer, peer, batch)
            except (TierError, TimeoutError) as error:
                self.core.counts["parting_failed"] += 1
                log.warning(
                    "drain: %s takes nothing: %s", peer, str(error) or f"no answer within {_SECONDS:g} s"
                )
                return False
            self._given.setdefault(peer, set()).update(there)
            self.pending -= len(there)
            self.core.counts["parting_given"] += len(there)
            if len(there) < len(batch):
                return False  # it is full
        return True

    async def _ask(self, transfer: Transfer, peer: str, batch: Iterable[Chunk]) -> list[bytes]:
        layout = self.core.memory.layout
        assert layout is not None, "run has asked"
        assert self.address is not None, "run has asked"
        take = Take(
            source=self.address,
            fingerprint=layout.fingerprint.hex(),
            chunks=[Offered(chunk.key.hex(), chunk.parent.hex(), chunk.index) for chunk in batch],
        )
        answer = await transfer.give(msgspec.json.encode(take))
        try:
            return [bytes.fromhex(key) for key in msgspec.json.decode(answer, type=Taken).there]
        except ValueError as error:
            raise TierError(f"{peer} answers with something else: {error}") from error


def _peer(peers: Sequence[str], root: bytes) -> str:
    """A chain stays together, and every drain chooses the same for it while the peers are the same."""
    return max(peers, key=lambda peer: (xxhash.xxh3_64_intdigest(peer.encode() + root), peer))
