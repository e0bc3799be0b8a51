"""Keeps requests from an engine that passes its checks and fails requests. Called by mind.py and eligible.py.

    closed --failures in a row--> open --pause--> half open --a first byte--> closed
                                    ^------------- failed, twice the pause ------'

Half open lets one request at a time through. It is a preference, not a wall: when no other replica can take a
request, one with an open breaker is better than none, or a client whose requests make engines fail could
take all of them away from the others.
"""

from __future__ import annotations

from kvist_router.mind.interface import Report

LONGEST_PAUSE = 60.0


class Breaker:
    """Of one replica: opens after `failures` for `pause` seconds. `tick` is called about once a second."""

    def __init__(self, failures: int = 5, pause: float = 5.0) -> None:
        self._failures = failures
        self._first_pause = self._pause = pause
        self._failed = 0
        self._open_until: float | None = None
        self._half_open = False
        self._probe = ""

    @property
    def state(self) -> str:
        """closed, open or half-open."""
        if self._half_open:
            return "half-open"
        return "closed" if self._open_until is None else "open"

    @property
    def takes(self) -> bool:
        """Whether a request may go there."""
        return self._open_until is None or (self._half_open and not self._probe)

    def sent(self, request_id: str) -> None:
        """A request goes there."""
        if self._half_open and not self._probe:
            self._probe = request_id

    def report(self, request_id: str, report: Report, now: float) -> None:
        """What became of one."""
        probed = bool(self._probe) and request_id == self._probe
        if report.event == "failed":
            self._fail(probed, now)
        elif report.event in ("ended", "first_byte") and (probed or self._open_until is None):
            self._close(report.event == "ended" or probed)
        if probed:
            self._probe = ""

    def reset(self) -> None:
        """The engine is a new one."""
        self._probe = ""
        self._close(True)

    def tick(self, now: float) -> None:
        """The pause may be over."""
        if self._open_until is not None and now >= self._open_until:
            self._half_open = True

    def _fail(self, probed: bool, now: float) -> None:
        self._failed += 1
        if probed:
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        if probed or (self._open_until is None and self._failed >= self._failures):
            self._open_until, self._half_open = now + self._pause, False

    def _close(self, for_good: bool) -> None:
        if for_good:
            self._failed = 0
        self._open_until, self._half_open, self._pause = None, False, self._first_pause
