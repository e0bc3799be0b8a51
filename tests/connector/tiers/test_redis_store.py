"""The contract against a real redis-server, and what can be wrong with one."""

import asyncio
import random
import re
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
import trustme
from redis.exceptions import InvalidResponse

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.testing.chunk_store import ChunkStoreSuite, key, read_all
from kvist_connector.testing.ports import free_port
from kvist_connector.tiers.base import ChunkStore, Read
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.metered import MeteredStore
from kvist_connector.tiers.pieces import PIECE_BYTES
from kvist_connector.tiers.redis import LARGEST_VALUE, RedisStore
from kvist_connector.tiers.redis_frames import MOST_ELEMENTS, Frames
from kvist_connector.tiers.redis_server import RedisServer
from kvist_connector.tiers.redis_slots import ask_slots
from kvist_connector.tiers.spread import SpreadStore

pytestmark = pytest.mark.timeout(120)
SCOPE = b"model-state-16-b"


@asynccontextmanager
async def opened(url: str, **settings):
    store = RedisStore(RedisServer(url, **settings))
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def redis(redis_server):
    server = await redis_server()
    async with opened(server.url) as store:
        yield store


class TestRedis(ChunkStoreSuite):
    @pytest.fixture
    def store(self, redis: RedisStore) -> ChunkStore:
        return redis


class TestSpread(ChunkStoreSuite):
    """Three servers behind breakers, as an agent has them."""

    @pytest.fixture
    async def store(self, redis_server):
        stores = {}
        for _ in range(3):
            server = RedisServer((await redis_server()).url)
            stores[server.label] = DeadlineStore(RedisStore(server), limit=30, most=2)
        store = MeteredStore(SpreadStore(stores), lambda *figures: None)
        yield store
        await store.close()


async def test_two_agents_store_a_chunk_once(redis_server):
    server = await redis_server()
    async with opened(server.url) as one, opened(server.url) as other:
        assert await one.put_if_absent(SCOPE + key(1), [b"first"])
        assert not await other.put_if_absent(SCOPE + key(1), [b"other"])
        assert await read_all(other, SCOPE + key(1), 5) == (5, b"first")


async def test_a_chunk_is_dropped_at_its_age_and_not_before(redis_server):
    server = await redis_server()
    async with opened(server.url, ttl=1000.0) as store:
        await store.put_if_absent(key(1), [b"x"])
        left = await store._client.pttl("kvist::" + key(1).hex())
        assert 0 < left <= 1_000_000
    async with opened(server.url) as store:
        await store.put_if_absent(key(2), [b"x"])
        assert await store._client.pttl("kvist::" + key(2).hex()) == -1


async def test_a_server_that_may_evict_nothing_is_full(redis_server):
    server = await redis_server(maxmemory="6mb", maxmemory_policy="noeviction")

    async def fill(store):
        for number in range(32):
            await store.put_if_absent(key(number), [bytes(500_000)])

    async with opened(server.url) as store:
        with pytest.raises(StorageFull, match="is full"):
            await fill(store)
        assert (await store.capacity()).limit == 6 * 2**20
        # What was refused left the connection whole.
        assert (await read_all(store, key(0), 1))[0] == 500_000
        for number in range(8):
            await store.delete(key(number))
        assert await store.put_if_absent(key(99), [bytes(1000)])


async def test_a_value_above_redis_own_limit_is_refused_before_it_is_sent(redis):
    assert redis.capabilities.largest == LARGEST_VALUE
    part = bytes(2**20)
    with pytest.raises(TierError, match="at most 536870912"):
        await redis.put_if_absent(key(1), [part] * 513)


async def test_a_wrong_password_is_told_and_a_corrected_file_is_read(redis_server, tmp_path):
    server = await redis_server(requirepass="right")
    secret = tmp_path / "password"
    secret.write_text("wrong\n")
    async with opened(server.url, password_file=secret) as store:
        with pytest.raises(TierError, match=r"refuses the password in .*redis\.password_file"):
            await store.get(Read(key(1), ()))
        secret.write_text("right\n")
        assert await store.put_if_absent(key(1), [b"x"])


async def test_a_rotated_password_is_used_at_the_next_connect(redis_server, tmp_path):
    server = await redis_server(requirepass="old")
    secret = tmp_path / "password"
    secret.write_text("old")
    async with opened(server.url, password_file=secret) as store:
        assert await store.put_if_absent(key(1), [b"x"])
        await store._client.config_set("requirepass", "new")
        secret.write_text("new")
        await store._pool.disconnect()
        assert (await read_all(store, key(1), 1))[0] == 1


async def test_a_missing_password_and_an_unreadable_file_are_told(redis_server, tmp_path):
    server = await redis_server(requirepass="right")
    async with opened(server.url) as store:
        with pytest.raises(TierError, match="a missing password"):
            await store.get(Read(key(1), ()))
    async with opened(server.url, password_file=tmp_path / "nothing") as store:
        with pytest.raises(TierError, match=r"redis\.password_file: .* cannot be read"):
            await store.get(Read(key(1), ()))


async def test_a_read_only_replica_is_told(redis_server):
    primary = await redis_server()
    replica = await redis_server(replicaof=f"127.0.0.1 {primary.port}")
    async with opened(replica.url) as store:
        with pytest.raises(TierError, match="read-only replica: give the primary"):
            await store.put_if_absent(key(1), [b"x"])


async def test_a_user_without_permissions_is_told(redis_server):
    server = await redis_server()
    async with opened(server.url) as store:
        await store._client.acl_setuser("default", reset_keys=True, keys=["other:*"])
        with pytest.raises(TierError, match="lacks a permission"):
            await store.put_if_absent(key(1), [b"x"])


async def test_a_cluster_member_is_told(redis_server):
    server = await redis_server(cluster_enabled="yes", cluster_port=str(free_port()))
    async with opened(server.url) as store:
        with pytest.raises(TierError, match="member of a Redis Cluster"):
            await store.put_if_absent(key(1), [b"x"])


async def test_what_is_no_redis_is_told():
    async def greet(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening, opened(f"redis://127.0.0.1:{port}") as store:
        with pytest.raises(TierError, match="does not speak Redis's protocol"):
            await store.get(Read(key(1), ()))


async def test_a_killed_server_is_an_error_and_a_new_one_is_used_at_once(redis_server):
    server = await redis_server()
    async with opened(server.url) as store:
        await asyncio.gather(*(store.put_if_absent(key(number), [b"x"]) for number in range(8)))
        await server.kill()
        with pytest.raises(TierError, match=f"redis://127.0.0.1:{server.port}"):
            await store.get(Read(key(1), ()))
        assert all(isinstance(size, TierError) for size in await store.sizes([key(1), key(2)]))
        await redis_server(port=server.port)
        assert await store.sizes([key(1)]) == [None]
        assert await store.put_if_absent(key(1), [b"y"])


async def test_a_put_that_is_given_up_leaves_nothing(redis_server):
    server = await redis_server()
    async with opened(server.url) as store:
        assert await store.sizes([key(1)]) == [None]
        server.pause()
        # Larger than every socket buffer on the way: it hangs while it is sent.
        put = asyncio.create_task(
            store._send_set(await store._pool.get_connection(), b"kvist::x", [bytes(2**26)], 2**26, [b"NX"])
        )
        await asyncio.sleep(0)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        server.resume()
        assert await store._client.exists("kvist::x") == 0


async def test_calls_given_up_anywhere_harm_no_other(redis_server):
    server = await redis_server()
    data = b"".join(number.to_bytes(4, "big") for number in range(2**20))
    async with opened(server.url, connections=4) as store:
        await store.put_if_absent(key(0), [data])
        for turns in range(40):
            into = bytearray(len(data))
            calls = [
                asyncio.create_task(store.get(Read(key(0), [memoryview(into)]))),
                asyncio.create_task(store.put_if_absent(key(turns + 1), [data])),
                asyncio.create_task(store.sizes([key(0)])),
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            left = bytes(into)
            # The next call gets its own answer, and nothing is written into buffers given back.
            assert await read_all(store, key(0), len(data)) == (len(data), data)
            assert bytes(into) == left
        sizes = await store.sizes([key(number) for number in range(1, 41)])
        assert set(sizes) <= {None, len(data)}


async def test_a_server_that_hangs_is_given_up_at_the_deadline(redis_server):
    server = await redis_server()
    async with opened(server.url) as inner:
        store = DeadlineStore(inner, limit=0.05, failures=1, pause=1000)
        await inner.put_if_absent(key(1), [b"x"])
        server.pause()
        with pytest.raises(TierError, match=r"no answer within 0\.05 s"):
            await store.get(Read(key(1), ()))
        with pytest.raises(TierError, match="paused"):
            await store.get(Read(key(1), ()))
        (answer,) = await store.sizes([key(1)])
        assert isinstance(answer, TierError)
        server.resume()


async def test_others_keys_are_left_alone(redis):
    await redis._client.set("somebody", "else")
    await redis._client.set("kvist:not:ours", "x")
    await redis.put_if_absent(SCOPE + key(1), [b"abc"])
    assert [item.key async for item in redis.items()] == [SCOPE + key(1)]


async def test_tls_with_the_given_ca_and_none_other(redis_server, tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = authority.issue_cert("127.0.0.1")
    own.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    pem = str(tmp_path / "server.pem")
    port = free_port()
    await redis_server(
        tls_port=str(port),
        tls_cert_file=pem,
        tls_key_file=pem,
        tls_ca_cert_file=str(tmp_path / "ca.pem"),
        tls_auth_clients="no",
    )
    url = f"rediss://127.0.0.1:{port}/0"
    async with opened(url, ca_file=tmp_path / "ca.pem") as store:
        assert await store.put_if_absent(key(1), [b"secret" * 100_000])
        assert (await read_all(store, key(1), 6)) == (600_000, b"secret")
    async with opened(url, ca_file=tmp_path / "other.pem") as store:
        with pytest.raises(TierError, match="certificate verify failed"):
            await store.get(Read(key(1), ()))


def random_answer(draw):
    """Values whose bytes look like headers are none."""
    kind = draw.choice("+:$*-")
    if kind == "*":
        parts = [random_answer(draw) for _ in range(draw.randrange(4))]
        return b"*%d\r\n" % len(parts) + b"".join(parts)
    if kind == "$":
        value = draw.choice([b"", b"*999999999\r\n", b"$5\r\n", bytes(40), b"\r\n"]) * draw.randrange(3)
        return b"$%d\r\n%s\r\n" % (len(value), value)
    return {"+": b"+OK\r\n", ":": b":17\r\n", "-": b"-ERR *999999999\r\n"}[kind]


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_followed_through_any_cut_and_claims_found_wherever_they_are(seed):
    draw = random.Random(seed)
    good = b"".join(random_answer(draw) for _ in range(30))
    claim = b"*%d\r\n" % (MOST_ELEMENTS + 1)
    for data, right in ((good, True), (good + claim, False)):
        frames, refused = Frames(), False
        cuts = sorted(draw.choices(range(len(data) + 1), k=20))
        try:
            for start, end in pairwise([0, *cuts, len(data)]):
                frames.check(data[start:end])
        except InvalidResponse:
            refused = True
        assert refused != right


@asynccontextmanager
async def answering(answer: bytes):
    """Whatever is asked, this is the answer; the client's name for itself is taken note of."""

    async def serve(reader, writer):
        while data := await reader.read(1 << 20):
            said = b"+OK\r\n" if b"SETINFO" in data else answer
            writer.write(said * max(1, len(re.findall(rb"\*\d+\r\n\$\d+\r\n[A-Z]", data))))
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def attempt(work):
    """A TierError or StorageFull is an answer."""
    with suppress(TierError, StorageFull):
        async with asyncio.timeout(60):
            return await work


@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n",
        b":5\r\n",
        b":-5\r\n",
        b":99999999999999999999999\r\n",
        b":abc\r\n",
        b"$3\r\n\xff\xfe\x00\r\n",
        b"$-1\r\n",
        b"$-7\r\n",
        b"*-1\r\n",
        b"*2\r\n:1\r\n:2\r\n",
        b"*1\r\n" * 3000 + b":1\r\n",
        b"*999999999\r\n",
        b"*2\r\n$1\r\n0\r\n*999999999\r\n",
        b"$99999999999\r\n",
        b"*x\r\n",
        b"-MOVED x\r\n",
        b"-ASK foo\r\n",
        b"-MOVED 1 127.0.0.1:1\r\n",
        b"-OOM full\r\n",
        b"-\r\n",
        b"-ERR \xff\xfe\r\n",
        b"#t\r\n",
        b"\r\n",
    ],
)
async def test_an_answer_that_is_none_is_a_failure_of_the_tier(answer):
    async with answering(answer) as url, opened(url, connect_timeout=30.0) as store:
        into = [memoryview(bytearray(2 * PIECE_BYTES))]
        await attempt(store.get(Read(key(1), into)))
        sizes = await store.sizes([key(1), key(2)])
        assert all(size is None or isinstance(size, int | TierError) for size in sizes)
        await attempt(store.put_if_absent(key(1), [b"x"]))
        await attempt(store.delete(key(1)))
        await attempt(store.capacity())
        await attempt(store.probe())
        with suppress(TierError):
            async for _ in store.items():
                break
        with pytest.raises(TierError):
            await ask_slots(RedisServer(url, connect_timeout=30.0))
