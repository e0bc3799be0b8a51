"""Leases by connection and request: what ends with them, ends for sure.

Called by the engine's session and the loader. A lease belongs to a request of one
connection; releasing the request or losing the connection ends it, exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvist_connector.agent.catalog import Chunk

MAX_REQUESTS = 65536


class LeaseBook:
    """Leases of one connection. `drop` gives back one lease on a chunk."""

    def __init__(self, take: Callable[[Chunk], None], drop: Callable[[Chunk], None]) -> None:
        self._take = take
        self._drop = drop
        self._held: dict[str, list[Chunk]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def chunks(self) -> int:
        """Leases held, over all requests."""
        return sum(len(chunks) for chunks in self._held.values())

    def take(self, request: str, chunks: Iterable[Chunk]) -> bool:
        """Lease the chunks to the request; false when too many requests hold leases."""
        held = self._held.get(request)
        if held is None:
            if len(self._held) >= MAX_REQUESTS:
                return False
            held = self._held[request] = []
        for chunk in chunks:
            self._take(chunk)
            held.append(chunk)
        return True

    def release(self, request: str) -> None:
        """End the request's leases; a request without any is nothing."""
        for chunk in self._held.pop(request, ()):
            self._drop(chunk)

    def release_all(self) -> None:
        """The connection ended."""
        for request in list(self._held):
            self.release(request)
