"""Fixtures of the router's tests: a router in this process, a client, waiting."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import hypothesis
import pytest

from kvist_connector.settings import validate
from kvist_router.app import Running, build
from kvist_router.logs import LogHandler
from kvist_router.settings import RouterSettings
from kvist_router.testing.patience import patient

hypothesis.settings.register_profile("router", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("router")

Router = Callable[..., Awaitable[Running]]


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    """Collects at the end of a module: a leaked socket or task is blamed on it, not on whoever runs next."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def log_of_its_own() -> Iterator[None]:
    """A program that runs in this process logs to what is standard error then; later tests have another."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in [item for item in root.handlers if isinstance(item, LogHandler)]:
        root.removeHandler(handler)
    root.setLevel(level)


@asynccontextmanager
async def _serving(values: dict[str, Any]) -> AsyncIterator[Running]:
    settings = validate(RouterSettings, patient({"port": 0, "admin_port": 0, **values}))
    async with build(settings) as running:
        task = asyncio.create_task(running.servers.run())
        try:
            yield running
        finally:
            running.servers.stop()
            running.servers.stop()  # at once
            await task


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    """Start a router: `await router(replicas=[..], ...)`; waits until its replicas are up."""
    async with AsyncExitStack() as stack:

        async def start(ready: bool = True, **values: Any) -> Running:
            running = await stack.enter_async_context(_serving(values))
            if ready:
                await until(
                    lambda: all(_up(item) for item in running.mind.replicas.values()) and _any(running)
                )
            return running

        yield start


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


def _any(running: Running) -> bool:
    return bool(running.mind.replicas)


def _up(replica: Any) -> bool:
    return replica.healthy and (replica.agent is None or replica.mirror.complete)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition that background tasks bring about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for every state
            await asyncio.sleep(0.005)


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Awaitable[None]]:
    """`await until(condition)`, with a deadline."""
    return until
