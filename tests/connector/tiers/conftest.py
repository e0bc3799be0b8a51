"""Real servers, one of each for the whole module, and stores over them that start empty."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from kvist_connector.testing import services


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@asynccontextmanager
async def started(kind, binary, folder):
    """Starts servers that are gone at the end; options are those of the server."""
    if binary is None:
        pytest.skip(services.missing())
    running = []

    async def begin(**options):
        server = kind(folder / f"{kind.__name__}{len(running)}", **options)
        running.append(server)
        await server.start()
        return server

    yield begin
    for server in running:
        await server.kill()


@pytest.fixture
async def redis_server(tmp_path):
    async with started(services.RedisProcess, services.redis_binary(), tmp_path) as begin:
        yield begin


@pytest.fixture
async def s3_server(tmp_path):
    async with started(services.S3Process, services.s3_binary(), tmp_path) as begin:
        yield begin
