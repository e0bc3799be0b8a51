"""A running operator: the election, and what it starts and stops. Built by app.py.

Standing by it only looks at the lease. Leading, it sweeps all clusters once, then works: the keys come from
watches (every operator has them), the sweep and the router poll (the leader only).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvist_operator.control.api import Key
from kvist_operator.control.counted import CountedApi
from kvist_operator.control.lease import Elector
from kvist_operator.control.metrics import Metrics
from kvist_operator.control.poll import RouterPoll
from kvist_operator.control.queue import WorkQueue
from kvist_operator.control.supervise import every, supervised
from kvist_operator.control.sweep import Sweep
from kvist_operator.control.workers import Workers


@dataclass(frozen=True)
class Loops:
    """What the leader does beside the queue. `sweep` makes one that has seen nothing yet."""

    sweep: Callable[[], Sweep]
    sweep_seconds: float
    poll: RouterPoll
    poll_seconds: float
    kinds: Callable[[], Awaitable[frozenset[str]]]


@dataclass(frozen=True)
class Operator:
    """Parts that callers and tests look at."""

    identity: str
    api: CountedApi
    queue: WorkQueue[Key]
    elector: Elector
    workers: Workers
    loops: Loops
    metrics: Metrics
    port: int = 0  # of health checks and metrics

    def problem(self) -> str:
        """Why this process should be restarted; empty when it need not."""
        return self.workers.problem

    def unready(self) -> str:
        """Why this operator is of no use now; empty when it leads or could."""
        return "" if self.elector.heard else "the API server has not answered about the lease"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Takes part in the election; the lease is given up at the end."""
        election = asyncio.create_task(supervised("election", self.elector.run, self.metrics))
        leading = asyncio.create_task(supervised("leading", self._lead, self.metrics))
        try:
            yield
        finally:
            await _ended([leading])
            await self.workers.stop()
            await _ended([election])
            await self.elector.release()

    async def _lead(self) -> None:
        """Work whenever the lease is held."""
        tasks: list[asyncio.Task[None]] = []
        try:
            while True:
                if self.elector.leading and not tasks:
                    self.workers.lead()
                    tasks = [self._loop("sweep"), self._loop("poll")]
                elif not self.elector.leading and tasks:
                    await self.workers.stop()
                    await _ended(tasks)
                    tasks = []
                await self.elector.change()
        finally:
            await _ended(tasks)

    def _loop(self, name: str) -> asyncio.Task[None]:
        loops = self.loops
        if name == "poll":
            turns = every(loops.poll_seconds, loops.poll.turn)
        else:
            sweep = loops.sweep()

            async def turn() -> None:
                await sweep.turn(await loops.kinds())

            turns = every(loops.sweep_seconds, turn)
        return asyncio.create_task(supervised(name, turns, self.metrics))


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
