"""Background loops of the operator: an error is counted and logged, and the loop starts again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvist_operator.control.errors import ApiError
from kvist_operator.control.metrics import Metrics

RESTART_SECONDS = 5.0
_log = logging.getLogger(__name__)


async def supervised(name: str, loop: Callable[[], Awaitable[None]], metrics: Metrics) -> None:
    """Run `loop` for ever."""
    while True:
        try:
            await loop()
        except ApiError as error:
            metrics.task_failed(name)
            _log.warning("%s: %s; it starts again in %s s", name, error, RESTART_SECONDS)
        except Exception:  # noqa: BLE001 - the boundary of every background task
            metrics.task_failed(name)
            _log.exception("background task %s failed; it starts again in %s s", name, RESTART_SECONDS)
        await asyncio.sleep(RESTART_SECONDS)


def every(seconds: float, turn: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
    """A loop of turns with a pause between."""

    async def loop() -> None:
        while True:
            await turn()
            await asyncio.sleep(seconds)

    return loop
