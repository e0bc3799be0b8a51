"""A real Redis that is killed, full, slow, read-only or locked: the agent goes on without and comes back."""

import asyncio
import shutil

import pytest
from redis.asyncio import Redis
from tests.connector.faults.conftest import SOON

from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing import services
from kvist_connector.testing.whole_agent import DEADLINE, keys_of

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
async def admin(redis):
    """A client of ours, to change the server's mind."""
    client = Redis(port=redis.port)
    yield client
    await client.aclose()


async def stocked(start, redis, chunks=6, **settings):
    agent = await start(redis={"urls": redis.url, **SOON, **settings})
    await agent.computed(keys_of(chunks))
    await agent.written()
    return agent


async def until(agent, text):
    async with asyncio.timeout(DEADLINE):
        while text not in (await agent.stats())["tiers"]["redis"]["problem"]:
            pass  # each look is a request that waits for its answer


async def back(agent):
    """It answers again, and by itself all is stored there that is not."""
    await agent.until_answers(Tier.REDIS, True)
    await agent.computed(keys_of(7), start=6)
    await agent.written()
    assert await agent.found(keys_of(7)) == [Tier.REDIS] * 7
    await agent.check()


async def test_redis_killed_and_started_again_empty(start, redis, tmp_path, warnings_of):
    agent = await stocked(start, redis)
    await redis.kill()
    assert await agent.found(keys_of(6)) == []
    await agent.computed(keys_of(6))
    await until(agent, f"redis://127.0.0.1:{redis.port}")
    await agent.until_answers(Tier.REDIS, False)
    again = services.RedisProcess(tmp_path / "again", port=redis.port)
    await again.start()
    await back(agent)
    assert set(warnings_of(Tier.REDIS).values()) == {1}
    await again.kill()


async def test_a_full_redis_refuses_and_takes_again_once_there_is_room(start, redis, admin, warnings_of):
    agent = await stocked(start, redis)
    used = (await admin.info("memory"))["used_memory"]
    await admin.config_set("maxmemory", used)
    await agent.computed(keys_of(6, first=1000))
    await agent.written()
    assert await agent.metric("kvist_agent_tier_events_total", tier="redis", reason="write_refused") >= 1
    # Full is no problem: what is there is served.
    assert await agent.metric("kvist_agent_tier_answers", tier="redis") == 1
    assert await agent.found(keys_of(6)) == [Tier.REDIS] * 6
    assert warnings_of(Tier.REDIS) == {"write_refused": 1}
    await admin.config_set("maxmemory", 0)
    await back(agent)


async def test_a_redis_that_cannot_save_serves_what_it_has(start, redis, admin, tmp_path, warnings_of):
    agent = await stocked(start, redis)
    await admin.config_set("save", "3600 1")
    shutil.rmtree(tmp_path / "redis")  # a disk that takes nothing
    await admin.bgsave()
    async with asyncio.timeout(DEADLINE):
        while (await admin.info("persistence"))["rdb_last_bgsave_status"] == "ok":
            pass  # each look is a request that waits for its answer
    await agent.computed(keys_of(6, first=1000))
    await agent.written()
    assert await agent.metric("kvist_agent_tier_answers", tier="redis") == 1
    assert await agent.found(keys_of(6)) == [Tier.REDIS] * 6
    assert warnings_of(Tier.REDIS) == {"write_refused": 1}
    await admin.config_set("stop-writes-on-bgsave-error", "no")
    await back(agent)


async def test_a_slow_redis_holds_no_request(start, redis, warnings_of):
    agent = await stocked(start, redis, lookup_deadline=0.2, deadline=0.5)
    redis.pause()
    async with asyncio.timeout(DEADLINE):
        assert await agent.found(keys_of(6)) == []
        await agent.computed(keys_of(6))
        await agent.computed(keys_of(6, first=1000))
        await agent.until_answers(Tier.REDIS, False)
    redis.resume()
    await agent.until_answers(Tier.REDIS, True)
    assert set(warnings_of(Tier.REDIS).values()) == {1}
    await agent.check()


async def test_a_primary_that_became_a_replica_serves_and_takes_nothing(
    start, redis, admin, tmp_path, warnings_of
):
    agent = await stocked(start, redis)
    primary = services.RedisProcess(tmp_path / "primary")
    await primary.start()
    await admin.replicaof("127.0.0.1", primary.port)
    await agent.computed(keys_of(3, first=1000))
    async with asyncio.timeout(DEADLINE):
        while not await agent.metric("kvist_agent_tier_events_total", tier="redis", reason="write_failed"):
            pass  # each look is a request that waits for its answer
    assert warnings_of(Tier.REDIS)["write_failed"] == 1
    await admin.replicaof("NO", "ONE")
    await agent.until_answers(Tier.REDIS, True)
    await agent.computed(keys_of(6), start=6)
    await agent.computed(keys_of(7), start=6)
    await agent.written()
    assert await agent.found(keys_of(7), memory=True)
    await agent.check()
    await primary.kill()


async def test_a_password_that_changed_is_read_from_its_file_again(
    start, redis, admin, tmp_path, warnings_of
):
    secret = tmp_path / "password"
    await admin.config_set("requirepass", "old")
    secret.write_text("old")
    agent = await stocked(start, redis, password_file=secret)
    await admin.config_set("requirepass", "new")
    await admin.client_kill_filter(_type="normal", skipme=True)
    assert await agent.found(keys_of(6)) == []
    await agent.computed(keys_of(6))
    await until(agent, "password")
    await agent.until_answers(Tier.REDIS, False)
    secret.write_text("new")
    await back(agent)
    assert set(warnings_of(Tier.REDIS).values()) == {1}


@pytest.mark.parametrize("offset", [0, 8, 4095, 4096, 4100, -1])
async def test_a_flipped_byte_in_redis_is_deleted_and_written_again(start, redis, admin, offset, warnings_of):
    agent = await stocked(start, redis)
    (name,) = [name async for name in admin.scan_iter(f"*{keys_of(6)[2].hex()}")]
    value = bytearray(await admin.get(name))
    value[offset] ^= 0x40
    await admin.set(name, bytes(value))
    assert await agent.found(keys_of(6)) == [Tier.REDIS] * 2
    assert sum(warnings_of(Tier.REDIS).values()) == 1
    assert await admin.exists(name) == 0
    await agent.computed(keys_of(6), start=2)
    await agent.written()
    await back(agent)
