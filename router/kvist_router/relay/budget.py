"""Retry budget: a fault must not double the load. Called by relay/app.py."""

from __future__ import annotations

BURST = 10.0


class RetryBudget:
    """Every request earns `ratio` of a retry, up to a burst; a retry spends one."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._tokens = BURST if ratio > 0 else 0.0

    def use(self, ratio: float) -> None:
        """Another ratio from now on; none takes what was saved."""
        self._ratio = ratio
        self._tokens = self._tokens if ratio > 0 else 0.0

    def request(self) -> None:
        """A first attempt begins."""
        self._tokens = min(BURST, self._tokens + self._ratio)

    def retry(self) -> bool:
        """Whether a retry may be made now."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
