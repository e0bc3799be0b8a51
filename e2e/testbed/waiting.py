"""Waiting with a deadline, and saying what did not happen."""

from __future__ import annotations

import time
from collections.abc import Callable

from testbed.bed import BedError

PAUSE = 0.1
# Between looks that start a kubectl, while engines need the processors.
LONG_PAUSE = 1.0


def until(
    what: str,
    check: Callable[[], bool],
    seconds: float,
    explain: Callable[[], str] = str,
    pause: float = PAUSE,
) -> None:
    """Ask `check` until it says yes. BedError naming `what` and the explanation at the deadline."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise BedError(f"{what}: not within {seconds:.0f} s. {explain()}".strip())
        time.sleep(pause)
