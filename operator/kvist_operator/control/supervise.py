"""Background loops of the operator: an error is counted and logged, and the loop starts again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvist_operator.control.errors import ApiError
from kvist_operator.control.metrics import Metrics
from kvist_operator.control.vitals import Vitals

RESTART_SECONDS = 5.0
# An attempt that lasts so long works; kopf gives its watches up after about 70 s of refusals.
LASTING_SECONDS = 150.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Supervisor:
    """Keeps background tasks going, and says of each whether it does its work."""

    metrics: Metrics
    vitals: Vitals

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `loop` for ever, as a task; `stop` ends it. If anything else does, the process is unwell."""
        return asyncio.create_task(self._run(name, loop), name=name)

    async def stop(self, *tasks: asyncio.Task[None]) -> None:
        """End tasks that were started here."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            self.vitals.forget(task.get_name())

    def every(
        self, name: str, seconds: float, turn: Callable[[], Awaitable[object]]
    ) -> Callable[[], Awaitable[None]]:
        """A loop of turns with a pause between; each that ends is a sign of life."""

        async def loop() -> None:
            while True:
                await turn()
                self.vitals.well(name)
                await asyncio.sleep(seconds)

        return loop

    async def _run(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            while True:
                lasting = asyncio.get_running_loop().call_later(LASTING_SECONDS, self.vitals.well, name)
                try:
                    await loop()
                except Exception as error:  # noqa: BLE001 - the boundary of every background task
                    self._failed(name, error)
                finally:
                    lasting.cancel()
                await asyncio.sleep(RESTART_SECONDS)
        finally:
            self.vitals.ended(name)

    def _failed(self, name: str, error: Exception) -> None:
        self.metrics.task_failed(name)
        self.vitals.failed(name, error)
        if isinstance(error, ApiError):
            _log.warning("%s: %s; it starts again in %s s", name, error, RESTART_SECONDS)
        else:
            _log.error(
                "background task %s failed; it starts again in %s s", name, RESTART_SECONDS, exc_info=error
            )
