"""Takes keys from the queue and reconciles them, while this operator leads. Run by app.py.

Workers exist only while the lease is held: `Workers.lead` starts them, `Workers.stop` ends them at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvist_operator.control.api import Key
from kvist_operator.control.errors import ApiError, NotLeader
from kvist_operator.control.metrics import Metrics
from kvist_operator.control.queue import WorkQueue
from kvist_operator.control.reconcile import Outcome, Reconciler

_log = logging.getLogger(__name__)


class Workers:
    """`count` clusters are worked on at a time; one turn ends by its deadline at the latest."""

    def __init__(
        self,
        queue: WorkQueue[Key],
        reconciler: Reconciler,
        metrics: Metrics,
        clock: Callable[[], float],
        count: int = 8,
        deadline: float = 120.0,
    ) -> None:
        self._queue = queue
        self._reconciler = reconciler
        self._metrics = metrics
        self._clock = clock
        self._count = count
        self._deadline = deadline
        self._tasks: list[asyncio.Task[None]] = []

    def lead(self) -> None:
        """Begin to act."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._run(), name=f"worker-{n}") for n in range(self._count)]

    async def stop(self) -> None:
        """Act no more: what is under way is cancelled."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def problem(self) -> str:
        """Why this process is not well; empty otherwise."""
        dead = [task.get_name() for task in self._tasks if task.done()]
        return f"{', '.join(dead)} ended" if dead else ""

    async def _run(self) -> None:
        while True:
            key = await self._queue.get()
            failed = True
            try:
                failed = await self.turn(key)
            finally:
                self._queue.done(key, failed=failed)

    async def turn(self, key: Key) -> bool:
        """One reconciliation; True when it has to be tried again after a pause."""
        started = self._clock()
        outcome, result = None, "failed"
        try:
            async with asyncio.timeout(self._deadline):
                outcome = await self._reconciler.reconcile(key)
            result = "done"
        except NotLeader as error:
            _log.info("%s: left to the operator that leads: %s", key, error)
            result = "left"
        except (ApiError, TimeoutError) as error:
            _log.warning("%s: tried again later: %s", key, str(error) or f"no end in {self._deadline:g} s")
        except Exception:  # noqa: BLE001 - the boundary of every worker: an unknown state must not end it
            _log.exception("%s: a state that is not understood; tried again later", key)
            result = "crashed"
            await self._reconciler.tell_unknown(key)
        self._metrics.reconciled(result, self._clock() - started)
        if outcome is not None:
            self._follow(key, outcome)
        return result in ("failed", "crashed")

    def _follow(self, key: Key, outcome: Outcome) -> None:
        if outcome.gone:
            self._queue.forget(key)
        elif outcome.again is not None:
            self._queue.add(key, outcome.again)
