"""What SIGTERM and SIGINT do to a process of the router. Used by server.py and processes/keeper.py."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def at_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Within, each of the two calls `stop` in the running loop."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
