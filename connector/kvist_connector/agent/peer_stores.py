"""The store over all peers, from the settings: a breaker and a limit for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvist_connector.agent.peer_settings import PeerSettings
from kvist_connector.tiers.anyone import AnyoneStore
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.peer import PeerStore, Transfer
from kvist_connector.tiers.peer_http import HttpTransfer

_FAILURES: Final = 3


def open_peers(settings: PeerSettings, token: Callable[[], str] | None) -> AnyoneStore:
    """Nothing is connected yet. `token`: the cluster's, of this moment."""

    def connect(url: str) -> ChunkStore:
        connections = settings.concurrency + 1  # one for questions
        return DeadlineStore(
            PeerStore(HttpTransfer(url, token, connections, settings.deadline)),
            settings.deadline,
            failures=_FAILURES,
            pause=settings.pause,
            # The rest of a lookup's time is for a second question.
            ask=settings.lookup_deadline / 2,
            most=settings.concurrency,
        )

    return AnyoneStore({url: connect(url) for url in settings.others}, connect, settings.pause)


def open_givers(settings: PeerSettings, token: Callable[[], str] | None) -> dict[str, Transfer]:
    """Connections to all peers for what a drain leaves them; nothing is connected yet."""
    return {url: HttpTransfer(url, token, 1, settings.deadline) for url in settings.others}
