"""Token buckets. Pure: the caller has the clock. Called by gate.py."""

from __future__ import annotations

MINUTE = 60.0


class Bucket:
    """Fills at `per_minute`, holds a minute's worth. What is taken may leave a debt that the next waits for.

    So a prompt longer than a minute's worth is served once, and paid for by a longer wait of those behind.
    """

    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / MINUTE
        self._level = per_minute
        self._at = now

    def change(self, per_minute: float, now: float) -> None:
        """Another rate from now on; what was taken stays taken."""
        self._fill(now)
        taken = self._rate * MINUTE - self._level
        self._rate = per_minute / MINUTE
        self._level = per_minute - taken

    def wait(self, now: float, least: float) -> float:
        """Seconds until it holds `least`, or is full where that is less; 0.0: it does."""
        self._fill(now)
        missing = min(least, self._rate * MINUTE) - self._level
        # An empty difference must not become a wait by rounding.
        return missing / self._rate if missing > 1e-9 else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take it out, whatever is there."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._rate * MINUTE, self._level + max(0.0, now - self._at) * self._rate)
        self._at = now
