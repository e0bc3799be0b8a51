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
from kvist_operator.control.poll import RouterPoll
from kvist_operator.control.queue import WorkQueue
from kvist_operator.control.supervise import Supervisor
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
    supervisor: Supervisor
    port: int = 0  # of health checks and metrics

    def problem(self) -> str:
        """Why this process should be restarted; empty when it need not."""
        return "; ".join(filter(None, (self.workers.problem, self.supervisor.vitals.problem())))

    def unready(self) -> str:
        """Why this operator is of no use now; empty when it leads or could."""
        if not self.elector.heard:
            return "the API server has not answered about the lease"
        return self.supervisor.vitals.unready()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Takes part in the election; the lease is given up at the end."""
        election = self.supervisor.start("election", self.elector.run)
        leading = self.supervisor.start("leading", self._lead)
        try:
            yield
        finally:
            await self.supervisor.stop(leading)
            await self.workers.stop()
            await self.supervisor.stop(election)
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
                    await self.supervisor.stop(*tasks)
                    tasks = []
                await self.elector.change()
        finally:
            await self.supervisor.stop(*tasks)

    def _loop(self, name: str) -> asyncio.Task[None]:
        loops, supervisor = self.loops, self.supervisor
        if name == "poll":
            return supervisor.start(name, supervisor.every(name, loops.poll_seconds, loops.poll.turn))
        sweep = loops.sweep()
        supervisor.metrics.watch_sweep(lambda: sweep.unlisted)

        async def turn() -> None:
            await sweep.turn(await loops.kinds())

        return supervisor.start(name, supervisor.every(name, loops.sweep_seconds, turn))
