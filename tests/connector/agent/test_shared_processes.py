"""Two real agents, a real Redis and a real S3 server: shared, killed, hung, cleared."""

import asyncio

import pytest

from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing import services
from kvist_connector.testing.agent_process import AgentProcess, launch
from kvist_connector.testing.fake_engine import FakeEngine, layout, prompt_keys
from kvist_connector.testing.ports import free_port
from kvist_connector.testing.redis_groups import ClusterMember, join

DEADLINE = 60.0
pytestmark = [
    pytest.mark.skipif(bool(services.missing()), reason=services.missing() or "installed"),
    pytest.mark.timeout(240),
]


@pytest.fixture
async def redis(tmp_path):
    server = services.RedisProcess(tmp_path / "redis")
    await server.start()
    yield server
    await server.kill()


@pytest.fixture
async def start(tmp_path):
    """Starts agents, each in a folder of its own, that are gone at the end of the test."""
    running = []

    async def begin(**settings):
        folder = tmp_path / f"agent{len(running)}"
        folder.mkdir()
        agent = await AgentProcess.start(folder, **settings)
        running.append(agent)
        return agent

    yield begin
    for agent in running:
        await agent.kill()


def keys(chunks, first=0):
    return prompt_keys(range(first, first + 8 * chunks))


async def stored(agent, chain, offered=None):
    """The chain, committed by an engine of this agent and written behind."""
    engine = await FakeEngine.start(agent.socket, offered)
    await engine.store(chain)
    await engine.lookup(chain)
    _, left = await agent.post("/v1/kvist/flush", {"deadline": DEADLINE})
    assert left["pending_chunks"] == 0
    return engine


async def until(check):
    """Wait for a condition of an agent, with a deadline."""
    async with asyncio.timeout(DEADLINE):
        while not await check():
            pass  # each check is a request that waits for its answer


async def test_what_one_agent_stored_the_other_loads_bit_equal(start, redis):
    first, second = await start(redis__urls=redis.url), await start(redis__urls=redis.url)
    two = layout(ranks=2)
    writer = await stored(first, keys(12), two)
    reader = await FakeEngine.start(second.socket, two)
    found = await reader.lookup(keys(12))
    assert found.tiers == bytes([Tier.REDIS] * 12)
    assert reader.holds(keys(12), found)
    # And the same chunks computed there are not sent again.
    await second.post("/v1/kvist/clear", {"tier": "memory"})
    await reader.store(keys(12))
    await reader.lookup(keys(12))
    await second.post("/v1/kvist/flush", {"deadline": DEADLINE})
    stats = await second.stats()
    assert stats["tiers"]["memory"]["chunks"] == 12
    assert stats["tiers"]["redis"]["stored_bytes"] == 0
    assert stats["tiers"]["redis"]["loaded_bytes"] == 12 * stats["chunk_bytes"]
    assert stats["tiers"]["redis"]["problem"] == ""
    _, text = await second.get("/metrics")
    assert 'kvist_agent_tier_operation_seconds_count{operation="get",outcome="ok",tier="redis"} 12.0' in text
    assert 'kvist_agent_tier_chunks{tier="redis"} 12.0' in text
    await writer.stop()
    await reader.stop()


@pytest.fixture
async def members(tmp_path):
    """Three primaries of a Redis Cluster."""
    members = [ClusterMember(tmp_path / f"member{number}") for number in range(3)]
    for member in members:
        await member.start()
    await join(members)
    yield members
    for member in members:
        await member.kill()


async def test_agents_share_a_redis_cluster_and_clear_all_of_it(start, members):
    settings = {"redis__urls": members[0].url, "redis__cluster": "true"}
    first, second = await start(**settings), await start(**settings)
    writer = await stored(first, keys(24))
    assert min([await member.ask("DBSIZE") for member in members]) > 0
    reader = await FakeEngine.start(second.socket)
    found = await reader.lookup(keys(24))
    assert found.tiers == bytes([Tier.REDIS] * 24)
    assert reader.holds(keys(24), found)
    status, answer = await first.post("/v1/kvist/clear", {"tier": "redis"})
    assert (status, answer["chunks"]) == (200, 24)
    assert [await member.ask("DBSIZE") for member in members] == [0, 0, 0]
    await writer.stop()
    await reader.stop()


async def test_disk_comes_before_redis_and_both_are_written(start, redis, tmp_path):
    agent = await start(redis__urls=redis.url, disk__path=tmp_path / "disk")
    engine = await stored(agent, keys(6))
    tiers = (await agent.stats())["tiers"]
    assert tiers["disk"]["chunks"] == tiers["redis"]["chunks"] == 6
    await agent.post("/v1/kvist/clear", {"tier": "memory"})
    assert (await engine.lookup(keys(6))).tiers == bytes([Tier.DISK] * 6)
    for tier in ("memory", "disk"):
        await agent.post("/v1/kvist/clear", {"tier": tier})
    found = await engine.lookup(keys(6))
    assert found.tiers == bytes([Tier.REDIS] * 6)
    assert engine.holds(keys(6), found)
    await engine.stop()


async def test_redis_killed_in_the_middle_and_started_again(start, redis):
    agent = await start(redis__urls=redis.url, redis__pause=0.1)
    engine = await stored(agent, keys(6))
    await redis.kill()
    await agent.post("/v1/kvist/clear", {"tier": "memory"})
    found = await engine.lookup(keys(6))
    assert (found.refs, found.known) == ((), 0)
    # The engine computes and the agent keeps, as without a Redis.
    await engine.store(keys(6))
    assert engine.holds(keys(6), await engine.lookup(keys(6)))
    await agent.post("/v1/kvist/flush", {"deadline": DEADLINE})
    stats = await agent.stats()
    assert stats["tier_counters"]["redis"]["ask_failed"] >= 1
    await until(lambda: names_redis(agent))
    assert (await agent.get("/readyz"))[0] == 200

    again = services.RedisProcess(redis_folder(agent), port=redis.port)
    await again.start()
    # Nobody uses it meanwhile: the agent has to look by itself.
    await until(lambda: all_well(agent))
    # A new chunk brings those before it along.
    await engine.store(keys(7), start=6)
    await engine.lookup(keys(7))
    await agent.post("/v1/kvist/flush", {"deadline": DEADLINE})
    await agent.post("/v1/kvist/clear", {"tier": "memory"})
    found = await engine.lookup(keys(7))
    assert found.tiers == bytes([Tier.REDIS] * 7)
    assert engine.holds(keys(7), found)
    await engine.stop()
    await again.kill()


async def names_redis(agent):
    _, metrics = await agent.get("/metrics")
    named = "redis://127.0.0.1" in (await agent.stats())["tiers"]["redis"]["problem"]
    return named and 'kvist_agent_tier_answers{tier="redis"} 0.0' in metrics


async def names_no_answer(agent):
    return "no answer within" in (await agent.stats())["tiers"]["redis"]["problem"]


async def all_well(agent):
    _, metrics = await agent.get("/metrics")
    well = 'kvist_agent_tier_answers{tier="redis"} 1.0' in metrics
    return well and not (await agent.stats())["tiers"]["redis"]["problem"]


def redis_folder(agent):
    return agent.folder / "redis-again"


async def test_a_redis_that_hangs_holds_no_request(start, redis):
    settings = {"redis__lookup_deadline": 0.05, "redis__deadline": 0.2, "redis__pause": 3600}
    agent = await start(redis__urls=redis.url, **settings)
    engine = await FakeEngine.start(agent.socket)
    redis.pause()
    for number in range(8):
        assert not (await engine.lookup(keys(4, first=1000 * number))).refs
    counters = (await agent.stats())["tier_counters"]["redis"]
    assert counters.get("ask_failed", 0) + counters.get("rules_failed", 0) >= 1
    await engine.store(keys(4))
    assert engine.holds(keys(4), await engine.lookup(keys(4)))
    # What came too late for lookups is no problem yet: the agent asks once more, with more time.
    await until(lambda: names_no_answer(agent))
    redis.resume()
    await engine.stop()


async def test_an_agent_starts_without_its_redis_and_says_so(start):
    agent = await start(redis__urls=f"redis://127.0.0.1:{free_port()}", redis__lookup_deadline=1)
    assert (await agent.stats())["tier_counters"]["redis"]["unreachable"] == 1
    assert (await agent.get("/readyz"))[0] == 200
    await until(lambda: names_redis(agent))


async def test_clear_is_for_every_agent(start, redis):
    first, second = await start(redis__urls=redis.url), await start(redis__urls=redis.url)
    writer = await stored(first, keys(6))
    reader = await FakeEngine.start(second.socket)
    status, answer = await first.post("/v1/kvist/clear", {"tier": "redis"})
    assert (status, answer["chunks"], answer["bytes"]) == (200, 6, 6 * (16384 + 4096))
    assert not (await reader.lookup(keys(6))).refs
    assert len((await writer.lookup(keys(6))).refs) == 6
    await redis.kill()
    status, answer = await first.post("/v1/kvist/clear", {"tier": "redis"})
    assert status == 503
    assert "redis://127.0.0.1" in answer["error"]["message"]
    await writer.stop()
    await reader.stop()


async def test_lookup_over_http_names_what_redis_has(start, redis):
    first, second = await start(redis__urls=redis.url), await start(redis__urls=redis.url)
    writer = await stored(first, keys(3))
    reader = await FakeEngine.start(second.socket)
    _, found = await second.post("/v1/kvist/lookup", {"keys": [key.hex() for key in keys(5)]})
    assert [chunk["tiers"] for chunk in found["chunks"]] == [["redis"]] * 3 + [[]] * 2
    assert found["hit_chunks"] == 3
    await writer.stop()
    await reader.stop()


async def test_another_model_sees_nothing(start, redis):
    first, second = await start(redis__urls=redis.url), await start(redis__urls=redis.url)
    writer = await stored(first, keys(6))
    other = await FakeEngine.start(second.socket, layout(b"g" * 32))
    # Even under the same keys, which no two models have.
    assert not (await other.lookup(keys(6))).refs
    await writer.stop()
    await other.stop()


async def test_chunks_go_through_redis_and_s3_to_an_agent_that_has_s3_only(start, redis, tmp_path):
    s3 = services.S3Process(tmp_path / "s3")
    await s3.start()
    bucket = {
        "object_store__url": s3.url,
        "object_store__endpoint": s3.endpoint,
        "object_store__credentials_file": s3.credentials_file,
    }
    first = await start(redis__urls=redis.url, **bucket)
    second = await start(**bucket)
    writer = await stored(first, keys(40))
    tiers = (await first.stats())["tiers"]
    assert tiers["redis"]["chunks"] == tiers["object"]["chunks"] == 40
    reader = await FakeEngine.start(second.socket)
    found = await reader.lookup(keys(20))
    assert found.tiers == bytes([Tier.OBJECT] * 20)
    assert reader.holds(keys(20), found)
    await writer.stop()
    await reader.stop()
    await s3.kill()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"redis__urls": "redis://:secret@host"}, r"put it into redis.password_file"),
        ({"redis__urls": "http://host"}, "give redis://"),
        ({"redis__urls": "redis://h,redis://h:6379/"}, "is named twice"),
        ({"redis__urls": "redis://h", "redis__password_file": "/nowhere/at/all"}, "redis.password_file"),
        ({"object_store__url": "ftp://bucket"}, "give s3://bucket/prefix"),
        ({"object_store__url": "s3://b", "object_store__credentials_file": "/nowhere"}, "credentials_file"),
        ({"object_store__url": "s3://b", "object_store__endpoint": "host:9000"}, "object_store.endpoint"),
    ],
)
async def test_wrong_settings_are_refused_in_words(tmp_path, settings, text):
    process = await launch(tmp_path, **settings)
    async with asyncio.timeout(DEADLINE):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert text in errors.decode()
    assert "secret" not in errors.decode()
