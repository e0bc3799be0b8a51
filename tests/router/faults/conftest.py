"""What must be left when a fault is over: nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from kvist_router.app import Running

AtRest = Callable[[Running], Awaitable[None]]


@pytest.fixture
def at_rest(until: Callable[..., Awaitable[None]]) -> AtRest:
    """`await at_rest(running)`: nothing of any request is left."""

    async def check(running: Running) -> None:
        mind = running.mind
        await until(lambda: len(mind.in_flight) == 0)
        await until(lambda: not _serving())
        for replica in mind.replicas.values():
            assert (replica.outstanding_requests, replica.outstanding_tokens) == (0, 0)
            if replica.agent is None:  # else until its feed says that they are there, or it is late
                assert len(replica.pending) == 0
        assert len(mind.gate) == 0
        gc.collect()

    return check


@pytest.fixture
def serving() -> Callable[[], list[str]]:
    """What `at_rest` waits for, so that a test can see that it sees: it goes by names, one of uvicorn's."""
    return _serving


def _serving() -> list[str]:
    """Coroutines of tasks that serve a request."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [
        name for name in names if name.startswith(("RequestResponseCycle", "Watch._disconnect", "_send_on"))
    ]
