"""Real agents that read from each other: wired by their settings, killed, and ended under a reader."""

import asyncio

import pytest

from kvist_connector import names
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_parts import keys_of as keys
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine, layout

pytestmark = pytest.mark.timeout(120)
# A loaded machine is no slow peer.


@pytest.fixture
async def start(tmp_path):
    """Starts agents that are gone at the end of the test."""
    running = []

    async def begin(**settings):
        folder = tmp_path / f"agent{len(running)}"
        folder.mkdir()
        running.append(await AgentProcess.start(folder, **settings))
        return running[-1]

    yield begin
    for agent in running:
        await agent.terminate()


async def serving(start, chunks, offered=None, **settings):
    """An agent with chunks that serves them, its engine, and where."""
    agent = await start(peer__host="127.0.0.1", peer__port=0, **settings)
    engine = await FakeEngine.start(agent.socket, offered)
    await engine.store(keys(chunks))
    await engine.lookup(keys(chunks))
    _, offer = await agent.post(names.PATH_OFFER, {"all": True})
    return agent, engine, f"http://127.0.0.1:{offer['port']}"


async def test_a_peer_is_read_and_its_loss_is_a_miss_that_metrics_show(start):
    two = layout(ranks=2)
    first, writer, url = await serving(start, 8, two)
    second = await start(peer__urls=url, peer__pause=0.001)
    reader = await FakeEngine.start(second.socket, two)
    found = await reader.lookup(keys(8))
    assert found.tiers == bytes([Tier.PEER] * 8)
    assert reader.holds(keys(8), found)
    _, sent = await first.get("/metrics")
    assert 'kvist_agent_events_total{reason="peer_sent"} 8.0' in sent
    await writer.stop()
    await first.kill()
    assert not (await reader.lookup(keys(4, first=500))).refs
    assert reader.holds(keys(8), await reader.lookup(keys(8)))
    _, seen = await second.get("/metrics")
    assert 'kvist_agent_tier_events_total{reason="peer_failed",tier="peer"}' in seen
    assert 'kvist_agent_tier_operation_seconds_count{operation="get",outcome="ok",tier="peer"} 8.0' in seen
    await reader.stop()


async def test_an_agent_ends_though_a_reader_hangs(start):
    large = layout(layer_bytes=4 << 20)
    first, writer, url = await serving(start, 1, large, memory="40Mi")
    host, _, port = url.removeprefix("http://").partition(":")
    reader, connection = await asyncio.open_connection(host, int(port), limit=1024)
    name = (b"f" * 16 + keys(1)[0]).hex()
    connection.write(f"GET {names.PATH_PEER_CHUNKS}/{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert b"200 OK" in await reader.readline()
    assert await first.terminate() == 0
    connection.transport.abort()
    await writer.stop()
