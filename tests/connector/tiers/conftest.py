"""Real servers, one of each for the whole module, and stores over them that start empty."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvist_connector.testing import services


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
async def redis_server(tmp_path):
    """Starts servers that are gone at the end of the test; options are those of redis-server."""
    if services.redis_binary() is None:
        pytest.skip(services.missing())
    running = []

    async def begin(**options) -> services.RedisProcess:
        server = services.RedisProcess(tmp_path / f"redis{len(running)}", **options)
        running.append(server)
        await server.start()
        return server

    yield begin
    for server in running:
        await server.kill()


@pytest.fixture
async def s3_server(tmp_path):
    """As `redis_server`."""
    if services.s3_binary() is None:
        pytest.skip(services.missing())
    running = []

    async def begin(**options) -> services.S3Process:
        server = services.S3Process(tmp_path / f"s3-{len(running)}", **options)
        running.append(server)
        await server.start()
        return server

    yield begin
    for server in running:
        await server.kill()
