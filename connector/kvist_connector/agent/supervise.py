"""Background tasks that may not die quietly: a dead one stops the process with an error.

The named boundary for unexpected exceptions of the agent's tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Supervisor:
    """Owns tasks of one loop; `failed` names the first that died."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed: str = ""
        self.stopping = asyncio.Event()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends by itself; an exception in it is fatal."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def daemon(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that must not end before `close`, not even without an exception."""
        task = self.spawn(work)
        task.set_name(name)
        task.add_done_callback(lambda done: None if done.cancelled() else self.fail(f"{name} ended"))
        return task

    def fail(self, reason: str) -> None:
        """The process is unhealthy and stops."""
        if not self.failed:
            self.failed = reason
            log.error("fatal: %s", reason)
        self.stopping.set()

    async def close(self) -> None:
        """Cancel everything and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("task %s died", task.get_name(), exc_info=error)
            self.fail(f"task {task.get_name()} died: {type(error).__name__}: {error}")
