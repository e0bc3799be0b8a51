"""Leases by connection and request: what ends with them, ends for sure.

Called by the engine's session and the loader. A lease belongs to a request of one
connection; releasing the request or losing the connection ends it, exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvist_connector.agent.catalog import Chunk, Hold

MAX_REQUESTS = 65536


class LeaseBook:
    """Leases of one connection. `take` keeps chunks, `drop` ends that."""

    def __init__(self, take: Callable[[Sequence[Chunk]], Hold], drop: Callable[[Hold], None]) -> None:
        self._take = take
        self._drop = drop
        self._held: dict[str, list[Hold]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def chunks(self) -> int:
        """Chunks kept, over all requests."""
        return sum(len(hold.chunks) for holds in self._held.values() for hold in holds)

    def take(self, request: str, chunks: Sequence[Chunk]) -> bool:
        """Lease the chunks to the request; false when too many requests hold leases."""
        held = self._held.get(request)
        if held is None:
            if len(self._held) >= MAX_REQUESTS:
                return False
            held = self._held[request] = []
        if chunks:
            held.append(self._take(chunks))
        return True

    def release(self, request: str) -> None:
        """End the request's leases; a request without any is nothing."""
        for hold in self._held.pop(request, ()):
            self._drop(hold)

    def release_all(self) -> None:
        """The connection ended."""
        for request in list(self._held):
            self.release(request)
