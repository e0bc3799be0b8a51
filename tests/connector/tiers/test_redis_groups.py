"""The contract against a real Redis Cluster and behind real Sentinels, and what a failover means."""

import asyncio
from functools import partial

import pytest
import pytest_asyncio
from redis.crc import key_slot

from kvist_connector.agent.redis_settings import RedisSettings
from kvist_connector.agent.shared_stores import open_redis
from kvist_connector.errors import ConfigError, TierError
from kvist_connector.testing import services
from kvist_connector.testing.chunk_store import ChunkStoreSuite, key, read_all
from kvist_connector.testing.ports import free_port
from kvist_connector.testing.redis_groups import (
    PRIMARY,
    ClusterMember,
    SentinelProcess,
    agreed,
    ask,
    join,
    replicates,
    until,
)
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.redis_slots import parse_slots

pytestmark = [
    pytest.mark.skipif(services.redis_binary() is None, reason="redis-server is not installed"),
    pytest.mark.timeout(180),
    # Groups take seconds to find together: one loop for the module, so that tests share them.
    pytest.mark.asyncio(loop_scope="module"),
]
CHUNKS = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def begin(tmp_path_factory):
    """Starts servers that are gone at the end."""
    running = []

    async def start(kind, *arguments, **options):
        server = kind(tmp_path_factory.mktemp(kind.__name__), *arguments, **options)
        running.append(server)
        await server.start()
        return server

    yield start
    for server in running:
        await server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def members(begin):
    """Three primaries."""
    members = [await begin(ClusterMember) for _ in range(3)]
    await join(members)
    return members


def opened(*urls, limit=30.0, **settings):
    """As an agent opens them."""
    given = {"urls": urls, "deadline": limit, "lookup_deadline": 2 * limit, "pause": 0.2} | settings
    return open_redis(RedisSettings(**given))


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(members):
    for member in members:
        await member.ask("FLUSHALL")
    store = opened(members[1].url, cluster=True)
    yield store
    await store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(begin):
    """A primary, a replica and the Sentinel that watches them."""
    primary = await begin(services.RedisProcess)
    replica = await begin(services.RedisProcess, replicaof=f"127.0.0.1 {primary.port}")
    await until(lambda: replicates(replica.port))
    sentinel = await begin(SentinelProcess, primary)

    async def knows_replica():
        return len(await ask(sentinel.port, "SENTINEL", "REPLICAS", PRIMARY)) == 1

    await until(knows_replica)
    return primary, replica, sentinel


class TestCluster(ChunkStoreSuite):
    @pytest.fixture
    def store(self, cluster) -> ChunkStore:
        return cluster


class TestSentinel(ChunkStoreSuite):
    @pytest_asyncio.fixture(loop_scope="module")
    async def store(self, watched):
        primary, _, sentinel = watched
        await ask(primary.port, "FLUSHALL")
        store = opened(sentinel.url, sentinel=PRIMARY)
        yield store
        await store.close()


def body(number):
    return number.to_bytes(4, "big") * 500


async def fill(store):
    for number in range(CHUNKS):
        assert await store.put_if_absent(key(number), [body(number)])


async def readable(store):
    """Chunks that are served; what is served is right."""
    found = set()
    for number in range(CHUNKS):
        try:
            length, data = await read_all(store, key(number), 2000)
        except TierError:
            continue
        if length is not None:
            assert (length, data) == (2000, body(number))
            found.add(number)
    return found


async def test_every_member_has_some_and_all_are_listed(cluster, members):
    await fill(cluster)
    counts = [await member.ask("DBSIZE") for member in members]
    assert min(counts) > 0
    assert sum(counts) == CHUNKS
    assert {item.key async for item in cluster.items()} == {key(number) for number in range(CHUNKS)}
    assert (await cluster.capacity()).used > 0


async def test_a_slot_that_moved_is_followed_without_a_failure(cluster, members):
    await cluster.put_if_absent(key(1), [b"to know the map"])
    slots = [key_slot(f"kvist::{key(number).hex()}".encode()) for number in range(50)]
    moved = [number for number, slot in enumerate(slots) if 0 < slot < 5000]
    assert len(moved) > 3
    target = await members[2].ask("CLUSTER", "MYID")
    for number in moved:
        for member in (members[2], members[0], members[1]):
            await member.ask("CLUSTER", "SETSLOT", slots[number], "NODE", target)
    assert all(await asyncio.gather(*(cluster.put_if_absent(key(n), [b"followed"]) for n in moved)))
    for number in moved:
        assert await members[2].ask("EXISTS", f"kvist::{key(number).hex()}") == 1
    # Many at once that were asked at the wrong place are no reason to leave that member alone.
    assert cluster.problem == ""
    assert not any(isinstance(size, TierError) for size in await cluster.sizes(list(map(key, range(50)))))


def moving_keys(first=0, last=5000):
    """Numbers of chunks in slots of the first member; slots by number."""
    slots = {number: key_slot(f"kvist::{key(number).hex()}".encode()) for number in range(CHUNKS)}
    return {number: slot for number, slot in slots.items() if first < slot < last}


async def begin_moving(slots, source, target):
    """As `redis-cli --cluster reshard` does it, up to the moment when keys move."""
    source_id, target_id = await source.ask("CLUSTER", "MYID"), await target.ask("CLUSTER", "MYID")
    for slot in slots:
        await target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        await source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)


async def move_key(number, source, target):
    await source.ask("MIGRATE", "127.0.0.1", target.port, f"kvist::{key(number).hex()}", 0, 5000)


async def end_moving(slots, source, target, others):
    target_id = await target.ask("CLUSTER", "MYID")
    for slot in slots:
        for member in (target, source, *others):
            await member.ask("CLUSTER", "SETSLOT", slot, "NODE", target_id)


async def test_while_a_slot_is_moved_its_keys_are_found_at_both_members(begin):
    """The one that is given the slots has none before, so no map names it."""
    source, other, target = [await begin(ClusterMember) for _ in range(3)]
    await join([source, other])
    await target.ask("CLUSTER", "MEET", "127.0.0.1", source.port, source.bus)
    for member in (source, other, target):
        await until(partial(agreed, member, 3))
    store = opened(source.url, cluster=True)
    await fill(store)
    slots = moving_keys()
    gone, staying, absent = sorted(slots)[::3], sorted(slots)[1::3], sorted(slots)[2::3]
    assert min(len(gone), len(staying), len(absent)) > 2
    for number in absent:
        await store.delete(key(number))
    await begin_moving(set(slots.values()), source, target)
    for number in gone:
        await move_key(number, source, target)
    present = [number for number in range(CHUNKS) if number not in absent]
    assert await readable(store) == set(present)
    sizes = await store.sizes([key(number) for number in range(CHUNKS)])
    assert sizes == [None if number in absent else 2000 for number in range(CHUNKS)]
    # What is new is stored where the slot is going, once; what is there anywhere stays as it is.
    assert [await store.put_if_absent(key(number), [body(number)]) for number in range(CHUNKS)] == [
        number in absent for number in range(CHUNKS)
    ]
    assert await target.ask("DBSIZE") == len(gone) + len(absent)
    for number in (gone[0], staying[0], absent[0]):
        assert not await store.replace(key(number), b"another", [b"changed"])
        assert await store.replace(key(number), body(number)[:28], [b"changed"])
        assert (await read_all(store, key(number), 7)) == (7, b"changed")
    found = {item.key async for item in store.items()}
    assert found == {key(number) for number in range(CHUNKS)}
    for number in (gone[1], staying[1], absent[1]):
        assert await store.delete(key(number))
    assert await store.sizes([key(number) for number in (gone[1], staying[1], absent[1])]) == [None] * 3
    assert store.problem == ""
    await store.close()


async def test_a_slot_that_moves_under_load_costs_no_miss(cluster, members):
    """Keys go one by one, each between two looks at it at most."""
    await fill(cluster)
    source, target, other = members[1], members[0], members[2]
    slots = moving_keys(5500, 10900)
    moved = asyncio.Event()

    async def read_on():
        rounds = 0
        while not moved.is_set() or rounds < 2:
            assert await readable(cluster) == set(range(CHUNKS))
            rounds += 1

    reading = [asyncio.create_task(read_on()) for _ in range(3)]
    await begin_moving(set(slots.values()), source, target)
    for number in slots:
        await move_key(number, source, target)
    await end_moving(set(slots.values()), source, target, [other])
    moved.set()
    await asyncio.gather(*reading)
    assert cluster.problem == ""


async def test_a_member_that_hangs_takes_its_own_answers_and_no_others(cluster, members):
    await fill(cluster)
    names = [key(number) for number in range(CHUNKS)]
    store = opened(members[0].url, cluster=True, limit=0.5)
    assert await store.sizes(names) == [2000] * CHUNKS
    members[2].pause()
    try:
        sizes = await store.sizes(names)
    finally:
        members[2].resume()
    lost = [size for size in sizes if size != 2000]
    assert 0 < len(lost) < CHUNKS
    assert all(isinstance(size, TierError) for size in lost)
    await store.close()


async def test_no_member_is_told_and_so_is_a_server_that_is_none(begin):
    single = await begin(services.RedisProcess)
    for url, words in ((single.url, "cluster support disabled"), ("redis://127.0.0.1:1/0", "127.0.0.1:1")):
        store = opened(url, cluster=True)
        with pytest.raises(TierError, match=words):
            await store.probe()
        (answer,) = await store.sizes([key(1)])
        assert isinstance(answer, TierError)
        await store.close()


async def test_a_member_that_fails_is_missed_until_its_replica_takes_over(begin):
    """Some miss meanwhile, nothing wrong is served, and nobody has to be told."""
    primaries = [await begin(ClusterMember) for _ in range(3)]
    replica = await begin(ClusterMember)
    await join(primaries, {0: replica})
    store = opened(*(member.url for member in primaries), cluster=True, limit=5.0)
    await fill(store)
    await primaries[0].ask("WAIT", 1, 10_000)
    await primaries[0].kill()
    left = await readable(store)
    assert 0 < len(left) < CHUNKS
    sizes = await store.sizes([key(number) for number in range(CHUNKS)])
    assert {number for number, size in enumerate(sizes) if size == 2000} >= left

    async def all_are_back():
        return len(await readable(store)) == CHUNKS

    await until(all_are_back)
    await store.probe()
    assert store.problem == ""
    for number in range(CHUNKS):
        await store.delete(key(number))
    await fill(store)
    await store.close()


async def test_behind_sentinels_the_store_follows_the_primary(watched):
    primary, replica, sentinel = watched
    # The first address is nobody's: the next one is asked.
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    store = opened(nobody, sentinel.url, sentinel=PRIMARY, limit=5.0)
    await ask(primary.port, "FLUSHALL")
    await fill(store)
    await ask(primary.port, "WAIT", 1, 10_000)
    await primary.kill()
    assert await readable(store) == set()
    with pytest.raises(TierError):
        await store.put_if_absent(key(1000), [b"x"])

    async def all_are_back():
        return len(await readable(store)) == CHUNKS

    await until(all_are_back)
    assert await store.put_if_absent(key(1000), [b"written to the new one"])
    assert await ask(replica.port, "EXISTS", f"kvist::{key(1000).hex()}") == 1
    await store.probe()
    assert store.problem == ""
    await store.close()


async def test_a_sentinel_that_hangs_is_passed_over_by_callers_who_cannot_wait(begin):
    primary = await begin(services.RedisProcess)
    hanging, well = [await begin(SentinelProcess, primary) for _ in range(2)]
    hanging.pause()
    store = opened(hanging.url, well.url, sentinel=PRIMARY, limit=0.5, lookup_deadline=0.1, pause=0.01)

    async def answers():
        return (await store.sizes([key(1)])) == [None]

    assert not await answers()
    await until(answers)
    hanging.resume()
    await store.close()


async def test_an_unknown_primary_is_told(watched):
    *_, sentinel = watched
    store = opened(sentinel.url, sentinel="other")
    with pytest.raises(TierError, match=r"other of the Sentinels .*names a primary that is up"):
        await store.put_if_absent(key(1), [b"x"])
    await store.close()


@pytest.mark.parametrize(
    ("asked", "host", "url"),
    [
        ("redis://a:1/0", b"10.0.0.1", "redis://10.0.0.1:7/0"),
        ("rediss://me@a:1/0", b"b.example", "rediss://me@b.example:7/0"),
        ("redis://a:1", b"", "redis://a:7"),
        ("redis://a:1", None, "redis://a:7"),
        ("redis://[::1]:1", b"fd00::1", "redis://[fd00::1]:7"),
    ],
)
async def test_members_are_reached_as_the_one_that_named_them(asked, host, url):
    slots = parse_slots([[0, 100, [host, 7, b"id"]], [200, 16383, [b"other", 8, b"id"]]], asked)
    assert [slots.url(slot) for slot in (0, 100, 101)] == [url, url, None]
    assert not slots.whole


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cluster": True}, "redis.cluster needs addresses"),
        ({"cluster": True, "sentinel": "p", "urls": ["redis://a"]}, "exclude each other"),
        ({"sentinel": "p", "urls": ["unix:///run/redis"]}, "redis.sentinel needs hosts"),
        ({"cluster": True, "urls": ["redis://a", "rediss://b"]}, "may differ in host and port only"),
        ({"cluster": True, "urls": ["redis://a/2"]}, "database 0 only"),
        ({"sentinel_password_file": "/p", "urls": ["redis://a"]}, "set redis.sentinel too"),
    ],
)
async def test_settings_that_contradict_each_other_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        RedisSettings(**given)


async def test_one_server_twice_is_refused():
    with pytest.raises(ConfigError, match="redis://a:6379 is named twice"):
        opened("redis://a", "redis://me@a:6379/")


async def test_a_sentinels_own_password_is_read_from_its_file(begin, tmp_path):
    primary = await begin(services.RedisProcess, requirepass="inner")
    sentinel = await begin(SentinelProcess, primary, password="outer", primary_password="inner")
    files = {}
    for name, text in (("password_file", "inner"), ("sentinel_password_file", "wrong")):
        files[name] = tmp_path / name
        files[name].write_text(text)
    store = opened(sentinel.url, sentinel=PRIMARY, **files)
    with pytest.raises(TierError, match=r"sentinel_password_file"):
        await store.put_if_absent(key(1), [b"x"])
    files["sentinel_password_file"].write_text("outer")
    assert await store.put_if_absent(key(1), [b"x"])
    await store.close()
