"""An agent out of file descriptors, whose servers have closed the connections that it had."""

import asyncio
import resource
import signal
from contextlib import asynccontextmanager, contextmanager

import pytest
from redis.asyncio import Redis
from tests.connector.faults.left_behind import whole

from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing import services
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine
from kvist_connector.testing.whole_agent import DEADLINE, keys_of

pytestmark = pytest.mark.timeout(240)
CHAIN = keys_of(6)


@contextmanager
def none_left(process):
    """Nothing can be opened; what is open stays."""
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def in_redis(folder):
    """The tier, its settings, and what closes its connections."""
    server = services.RedisProcess(folder)
    await server.start()
    client = Redis(port=server.port)

    async def cut():
        await client.client_kill_filter(_type="normal", skipme=True)

    yield Tier.REDIS, {"redis__urls": server.url}, cut
    await client.aclose()
    await server.kill()


@asynccontextmanager
async def in_s3(folder):
    servers = [services.S3Process(folder)]
    await servers[0].start()

    async def cut():
        await servers[-1].kill()
        servers.append(services.S3Process(folder, port=servers[0].port))
        await servers[-1].start()

    server = servers[0]
    settings = {"url": server.url, "endpoint": server.endpoint, "region": "us-east-1"}
    settings["credentials_file"] = server.credentials_file
    yield Tier.OBJECT, {f"object_store__{name}": value for name, value in settings.items()}, cut
    await servers[-1].kill()


@pytest.fixture(params=[in_redis, in_s3], ids=["redis", "s3"])
async def shared(request, tmp_path):
    if services.missing():
        pytest.skip(services.missing())
    async with request.param(tmp_path / "server") as found:
        yield found


async def test_servers_cannot_be_reached_without_file_descriptors_and_are_afterwards(tmp_path, shared):
    tier, settings, cut = shared
    section = next(iter(settings)).partition("__")[0]
    agent = await AgentProcess.start(tmp_path, **settings, **{f"{section}__pause": 0.05})
    engine = await FakeEngine.start(agent.socket)
    await engine.store(CHAIN)
    await engine.lookup(CHAIN)
    await agent.post("/v1/kvist/flush", {"deadline": DEADLINE})
    await agent.post("/v1/kvist/clear", {"tier": "memory"})
    with none_left(agent):
        await cut()
        assert not (await engine.lookup(CHAIN)).refs
        await engine.store(CHAIN)
        assert engine.holds(CHAIN, await engine.lookup(CHAIN))
    await agent.post("/v1/kvist/clear", {"tier": "memory"})
    async with asyncio.timeout(DEADLINE):
        while len((found := await engine.lookup(CHAIN)).refs) < len(CHAIN):
            pass  # each lookup is a question that waits for its answer
    assert found.tiers == bytes([tier] * 6)
    assert engine.holds(CHAIN, found)
    stats = await agent.stats()
    assert (stats["leases"], stats["tiers"][tier.label]["problem"]) == (0, "")
    assert stats["tier_counters"][tier.label]["ask_failed"] >= 1
    await engine.stop()
    agent._process.send_signal(signal.SIGTERM)
    _, said = await agent._process.communicate()
    assert said.decode().count(f"{tier.label} tier: ask_failed") == 1
    whole(agent.arena)
