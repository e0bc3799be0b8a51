"""The store over all peers, from the settings: a breaker and a limit for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvist_connector.agent.peer_settings import PeerSettings
from kvist_connector.agent.roster import Roster
from kvist_connector.agent.server_settings import guarded
from kvist_connector.tiers.anyone import AnyoneStore
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.peer import PeerStore, Transfer
from kvist_connector.tiers.peer_http import HttpTransfer
from kvist_connector.tls import LiveContext


@dataclass(frozen=True)
class Peers:
    """Who they are, and how each is reached. `token`: the cluster's, of this moment."""

    settings: PeerSettings
    roster: Roster
    token: Callable[[], str] | None
    tls: LiveContext | None = None

    def connect(self, url: str) -> Transfer:
        """For one errand; to be closed."""
        return HttpTransfer(url, self.token, 1, self.settings.deadline, self.tls)

    def store(self) -> AnyoneStore:
        """Over all of them; it follows the roster. Nothing is connected yet."""
        peers = AnyoneStore(self._open, self.settings.pause)
        peers.become(self.roster.addresses)
        self.roster.changed = peers.change
        return peers

    def _open(self, url: str) -> ChunkStore:
        connections = self.settings.concurrency + 1  # one for questions
        transfer = HttpTransfer(url, self.token, connections, self.settings.deadline, self.tls)
        return guarded(PeerStore(transfer), self.settings)
