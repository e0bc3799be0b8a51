"""Requests that were sent and have not ended. Called by mind/mind.py.

Every entry ends: by the relay's last report, which it sends in a `finally`, or by `expired` when
the relay itself is gone. Bounded by `limits.in_flight`: above it requests are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from kvist_router.mind.replica import Replica


class Elsewhere(msgspec.Struct, frozen=True, gc=False):
    """Where a policy that is not followed would have sent a request."""

    replica: str
    predicted_ttft: float


class InFlight(msgspec.Struct):
    """One dispatched request."""

    id: str
    replica: Replica
    keys: list[bytes]  # of all its prompts' full chunks
    computes: list[bytes]  # those it made pending
    uncached_tokens: int  # counted as outstanding until its prefill is over
    predicted_ttft: float
    decided: float
    waits_for_space: bool = False  # by the prediction
    elsewhere: dict[str, Elsewhere] = {}  # by policy
    first_byte: bool = False
    prefilled: bool = False
    answering_since: float | None = None  # when its prefill was over, if that was noticed


class Watcher(Protocol):
    """Is told what becomes of every entry (neighbours/publisher.py)."""

    def began(self, entry: InFlight) -> None:
        """It was dispatched."""

    def prefilled(self, entry: InFlight) -> None:
        """Its prefill is over; at its end too, if that was not noticed before."""

    def ended(self, entry: InFlight) -> None:
        """It has ended."""


class InFlightMap:
    """Dispatched requests by id; keeps the replicas' outstanding figures."""

    watcher: Watcher | None = None

    def __init__(self, capacity: int, longest: float) -> None:
        self._capacity = capacity
        self._longest = longest
        self._entries: dict[str, InFlight] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[InFlight]:
        return iter(self._entries.values())

    @property
    def full(self) -> bool:
        """Whether no more may be added."""
        return len(self._entries) >= self._capacity

    def get(self, request_id: str) -> InFlight | None:
        """The entry, None after its end."""
        return self._entries.get(request_id)

    def begin(self, entry: InFlight) -> None:
        """A request was dispatched."""
        self.end(entry.id)
        self._entries[entry.id] = entry
        entry.replica.outstanding_tokens += entry.uncached_tokens
        entry.replica.outstanding_requests += 1
        entry.replica.outstanding_prefills += 1
        entry.replica.lately.add(entry.uncached_tokens, entry.decided)
        if self.watcher is not None:
            self.watcher.began(entry)

    def first_byte(self, entry: InFlight, at: float | None) -> None:
        """Its answer began; `at` is None when it came whole, which says nothing of the prefill's end."""
        entry.first_byte = True
        self.prefilled(entry, at)

    def prefilled(self, entry: InFlight, at: float | None = None) -> None:
        """Its prefill is over."""
        if not entry.prefilled:
            entry.prefilled, entry.answering_since = True, at
            entry.replica.outstanding_tokens -= entry.uncached_tokens
            entry.replica.outstanding_prefills -= 1
            if self.watcher is not None:
                self.watcher.prefilled(entry)

    def end(self, request_id: str) -> InFlight | None:
        """Remove an entry; None when it is not there (any more)."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            replica = entry.replica
            replica.outstanding_requests -= 1
            self.prefilled(entry)
            if self.watcher is not None:
                self.watcher.ended(entry)
            if not replica.outstanding_requests:
                replica.idle()
        return entry

    def expired(self, now: float) -> Iterator[str]:
        """Ids whose relay never reported their end."""
        return iter([key for key, entry in self._entries.items() if now - entry.decided > self._longest])
