"""Agents whose tiers are about to fail, real servers behind a proxy, and what the log said."""

from __future__ import annotations

from collections import Counter

import pytest

from kvist_connector.agent import answering
from kvist_connector.testing import services
from kvist_connector.testing.fault_proxy import FaultProxy
from kvist_connector.testing.whole_agent import WholeAgent

SOON = {"pause": 0.05}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A tier that fails is asked again at once: these tests wait for nothing else."""
    monkeypatch.setattr(answering, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(answering, "LONGEST_SECONDS", 0.1)


@pytest.fixture
async def start(tmp_path):
    """Starts agents, each in a folder of its own, that are gone at the end of the test."""
    running = []

    async def begin(name="", **settings):
        values = {"shutdown_deadline": 0} | settings
        folder = tmp_path / (name or f"agent{len(running)}")
        folder.mkdir(exist_ok=True)
        running.append(await WholeAgent.start(folder, **values))
        return running[-1]

    yield begin
    for agent in running:
        if agent.running:
            await agent.check()
        await agent.stop()


@pytest.fixture
def warnings_of(caplog):
    """How often the log told of each cause at a tier, as `redis: read_failed`."""

    def count(tier):
        texts = [record.getMessage() for record in caplog.records]
        causes = [text.split(": ")[1] for text in texts if text.startswith(f"{tier.label} tier: ")]
        return Counter(causes)

    return count


@pytest.fixture
async def redis(tmp_path):
    """A Redis server; `again` starts it anew on its port, empty."""
    if services.redis_binary() is None:
        pytest.skip(services.missing())
    server = services.RedisProcess(tmp_path / "redis")
    await server.start()
    yield server
    await server.kill()


@pytest.fixture
async def s3(tmp_path):
    """An S3 server and a proxy before it."""
    if services.s3_binary() is None:
        pytest.skip(services.missing())
    server = services.S3Process(tmp_path / "s3")
    await server.start()
    proxy = FaultProxy(server.port)
    await proxy.start()
    yield server, proxy
    await proxy.close()
    await server.kill()
