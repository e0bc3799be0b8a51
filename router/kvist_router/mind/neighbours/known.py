"""What one other router has said, applied to this one's replicas. Called by reader.py and the simulation.

Its requests count like own ones: prefill tokens, requests, pending prefixes, and what was probably computed
where no feed tells. All of it is taken back when its stream ends. Bounded: beyond `capacity` the oldest goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvist_connector.keys import split_keys
from kvist_router.mind.neighbours.messages import Dispatched, Ended, Prefilled, Said
from kvist_router.mind.replica import Replica

PENDING_SECONDS = 30.0  # beyond twice the predicted time, until a pending key is given up


class _Entry(NamedTuple):
    replica: Replica
    tokens: int
    prefilling: bool
    keys: list[bytes]
    computes: list[bytes]


class Known:
    """Of the router `name`; `replicas` is the mind's own map."""

    def __init__(self, name: str, replicas: Mapping[str, Replica], capacity: int) -> None:
        self._name, self._replicas, self._capacity = name, replicas, capacity
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def hear(self, message: Said, now: float) -> None:
        """Take one message; requests that are not known are ignored."""
        if isinstance(message, Dispatched):
            self._dispatched(message, now)
        elif isinstance(message, Prefilled):
            self._prefilled(message.request)
        elif isinstance(message, Ended):
            self._ended(message.request)

    def forget(self) -> None:
        """Its stream has ended: nothing of it counts any more."""
        for request in list(self._entries):
            self._ended(request)

    def _dispatched(self, message: Dispatched, now: float) -> None:
        self._ended(message.request)
        replica = self._replicas.get(message.replica)
        if replica is None:
            return
        if len(self._entries) >= self._capacity:
            self._ended(next(iter(self._entries)))
        keys = split_keys(message.keys)
        computes = keys[message.held :]
        self._entries[message.request] = _Entry(replica, message.tokens, True, keys, computes)
        replica.elsewhere.add(message.tokens, 1, 1)
        replica.lately.add(message.tokens, now)
        expires = now + 2 * message.ready + PENDING_SECONDS
        replica.pending.add(computes, now + message.ready, expires, self._owner(message.request))

    def _prefilled(self, request: str) -> None:
        entry = self._entries.get(request)
        if entry is None or not entry.prefilling:
            return
        entry.replica.elsewhere.add(-entry.tokens, -1, 0)
        entry.replica.approximate.add(entry.keys)
        self._entries[request] = entry._replace(tokens=0, prefilling=False, keys=[])

    def _ended(self, request: str) -> None:
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        entry.replica.elsewhere.add(-entry.tokens, -int(entry.prefilling), -1)
        entry.replica.pending.drop(entry.computes, self._owner(request))

    def _owner(self, request: str) -> str:
        return f"{self._name}/{request}"
