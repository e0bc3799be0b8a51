"""The arenas of other agents as a lower tier: asked by key, read, never written to.

A shared tier whose copies are somebody else's: nothing is stored or deleted there, and what is cleared
or retired is only forgotten here. A peer that sends something else than the chunk is left alone for
a while. Called like any lower tier, and by handover.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.shared import SharedTier
from kvist_connector.errors import IntegrityError, TierError
from kvist_connector.protocol.tiers import Tier
from kvist_connector.tiers.anyone import AnyoneStore
from kvist_connector.tiers.envelope import EnvelopeStore

log = logging.getLogger(__name__)
_MOST_LOGGED = 64


class PeerTier(SharedTier):
    """`peers` is the store inside `store`; `searched`: by lookups. Who only serves waits for nobody."""

    def __init__(
        self,
        store: EnvelopeStore,
        peers: AnyoneStore,
        catalog: Catalog,
        busy: Busy,
        clock: Callable[[], float],
        chunk_bytes: Callable[[], int],
        lookup_deadline: float,
        searched: bool,
    ) -> None:
        super().__init__(Tier.PEER, store, catalog, busy, clock, chunk_bytes, lookup_deadline)
        self._peers = peers
        self.searched = searched
        self._logged: set[tuple[str, str]] = set()  # peer and cause
        peers.on_failure = self._peer_failed

    async def scan(self) -> None:
        """Peers start when we do, or later: who does not answer yet is no news."""

    def _keep_rules(self, fingerprint: bytes) -> None:
        """What is retired peers hear from the router."""

    def drop_all(self) -> tuple[int, int]:
        """Forget what peers have; it stays there."""
        self._forget()
        return 0, 0

    def drop(self, key: bytes) -> int | None:
        """Forget one chunk; nothing is taken away."""
        self._catalog.leave_below(self.tier, key)
        return None

    async def clear(self) -> tuple[int, int]:
        """See drop_all."""
        return self.drop_all()

    async def expect(self, peer: str, chunks: Sequence[tuple[bytes, bytes, int]]) -> None:
        """A peer has these: key, parent and index."""
        await self._peers.visit(peer, [self._store.name(self._fingerprint, key) for key, _, _ in chunks])
        size = self._store.stored_at_most(self._chunk_bytes())
        for key, parent, index in chunks:
            self._enter(key, parent, index, size)
        self._bound()

    async def _write(self, chunk: Chunk, parts: Sequence[memoryview], fingerprint: bytes) -> bool:
        raise TierError("a peer's arena can only be read")

    def _spoiled(self, key: bytes, error: IntegrityError) -> None:
        super()._spoiled(key, error)
        peer = self._peers.distrust(self._store.name(self._fingerprint, key))
        if peer:
            self._peer_failed(peer, error)

    def _delete_soon(self, key: bytes, fingerprint: bytes) -> None:
        """It is not ours."""

    def _peer_failed(self, peer: str, error: Exception) -> None:
        """Counted each time, logged once for each peer and cause."""
        self.counts["peer_failed"] += 1
        cause = peer, type(error).__name__
        if cause not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(cause)
            text = str(error) if peer in str(error) else f"{peer}: {error}"
            log.warning("peer %s (further ones are only counted)", text)
