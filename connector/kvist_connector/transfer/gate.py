"""The gate every copy passes, so that the agent can learn when older copies are over.

Called by transfer.base (enter, leave) and by the worker's reader thread (quiesce).
Invariant: `quiesce(ticket)` reports exactly once, after everything that was inside at
the time of the call has left; copies that enter later do not hold it up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Gate:
    """Counts copies by entry number. Thread-safe."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._next = 0
        self._inside: set[int] = set()
        self._waiting: dict[int, set[int]] = {}

    def enter(self) -> int:
        """The number to leave with."""
        with self._lock:
            self._next += 1
            self._inside.add(self._next)
            return self._next

    def leave(self, number: int) -> None:
        """Safe to call twice."""
        with self._lock:
            self._inside.discard(number)
            done = self._answered(number)
        for ticket in done:
            self._report(ticket)

    def quiesce(self, ticket: int) -> None:
        """Report the ticket once everything inside now has left."""
        with self._lock:
            busy = set(self._inside)
            if busy:
                self._waiting[ticket] = busy
        if not busy:
            self._report(ticket)

    def forget_tickets(self) -> None:
        """The connection that asked is gone; nobody waits for the answers."""
        with self._lock:
            self._waiting.clear()

    def _answered(self, number: int) -> list[int]:
        for busy in self._waiting.values():
            busy.discard(number)
        done = [ticket for ticket, busy in self._waiting.items() if not busy]
        for ticket in done:
            del self._waiting[ticket]
        return done
