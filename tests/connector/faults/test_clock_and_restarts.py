"""Clocks that jump, and agents, engines and Redis that start anew in any order: all stays right."""

import random
import time

import pytest
from tests.connector.faults.conftest import SOON

from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing import services
from kvist_connector.testing.whole_agent import keys_of

pytestmark = pytest.mark.timeout(240)
DAY = 86_400.0


@pytest.mark.parametrize("jump", [-3650 * DAY, -1.0, 3650 * DAY])
async def test_a_clock_that_jumps_between_starts_keeps_chunks_and_the_order_of_epochs(
    start, tmp_path, monkeypatch, jump
):
    settings = {"disk": {"path": tmp_path / "disk", "size": "10Mi"}}
    first = await start("one", **settings)
    await first.computed(keys_of(6))
    await first.written()
    epoch = (await first.stats())["epoch"]
    retired = (await first.post("retire", {"tag": "gone"}))["epoch"]
    await first.stop()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    second = await start("one", **settings)
    assert (await second.stats())["epoch"] > epoch
    assert await second.found(keys_of(6), memory=True) == [Tier.MEMORY] * 6
    assert await second.found(keys_of(6)) == [Tier.DISK] * 6
    assert (await second.stats())["retire_epoch"] == retired
    assert (await second.post("retire", {"tag": "gone too"}))["epoch"] > retired
    await second.check()


@pytest.mark.parametrize("jump", [-DAY, DAY])
async def test_a_clock_that_jumps_under_a_running_agent_moves_no_deadline(start, monkeypatch, jump):
    agent = await start()
    await agent.computed(keys_of(4))
    await agent.post("pin", {"keys": [key.hex() for key in keys_of(4)], "seconds": 3600})
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert (await agent.stats())["pinned"] == 4
    assert await agent.found(keys_of(4), memory=True) == [Tier.MEMORY] * 4
    await agent.post("unpin", {"all": True})
    await agent.check()


class Cluster:
    """Two agents on one Redis, an engine each; every part can be started anew."""

    def __init__(self, begin, redis, folder):
        self._begin, self._folder = begin, folder
        self.redis = redis
        self.agents = {}

    async def agent(self, name):
        """Started, or stopped as by a signal and started again on its arena and disk."""
        if name in self.agents:
            await self.agents[name].stop()
        disk = {"path": self._folder / f"{name}-disk", "size": "10Mi"}
        agent = await self._begin(name, redis={"urls": self.redis.url, **SOON}, disk=disk)
        self.agents[name] = agent

    async def engine(self, name):
        await self.agents[name].new_engine()

    async def server(self, name):
        await self.redis.kill()
        await self.redis.start()


@pytest.mark.skipif(services.redis_binary() is None, reason=services.missing() or "installed")
@pytest.mark.parametrize("seed", range(3))
async def test_parts_start_anew_in_any_order_and_every_byte_is_right(start, redis, tmp_path, seed):
    cluster, draw = Cluster(start, redis, tmp_path), random.Random(seed)
    for name in ("a", "b"):
        await cluster.agent(name)
    hits = 0
    for number in range(8):
        restart = draw.choice([cluster.agent, cluster.engine, cluster.engine, cluster.server])
        await restart(draw.choice("ab"))
        for name in ("a", "b"):
            prompt = keys_of(5, first=1000 * (number % 3))
            found = await cluster.agents[name].found(prompt, memory=draw.random() < 0.5)
            hits += len(found)
            await cluster.agents[name].computed(prompt, start=len(found))
    assert hits > 20, "nothing was ever found again"
    for agent in cluster.agents.values():
        await agent.until_answers(Tier.REDIS, True)
        await agent.written()
        await agent.check()
