"""A client killed after any piece that it sends to a shared store leaves each object whole or not there.

Points are found by running the operation once and noting the pieces that pass on the way to the server.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import pytest

from kvist_connector.agent.settings import ObjectStoreSettings
from kvist_connector.agent.shared_rules import SharedRules
from kvist_connector.agent.shared_stores import open_object_store
from kvist_connector.errors import StorageFull, TierError
from kvist_connector.protocol.retired import Retired
from kvist_connector.testing.chunk_store import key, read_all
from kvist_connector.testing.fault_proxy import Die, FaultProxy, Pass
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.redis import RedisStore
from kvist_connector.tiers.redis_server import RedisServer

pytestmark = pytest.mark.timeout(240)
SCOPE = b"model-state-16-b"
OLD, NEW = SCOPE + key(1), SCOPE + key(2)
DATA = b"".join(number.to_bytes(4, "big") for number in range(5000))
BEFORE = Retired().with_rule("tag", "a", 1)
AFTER = BEFORE.with_rule("tag", "b", 2)
LIMIT = 30.0


@pytest.fixture
async def redis_clients(redis):
    """Opens clients: by way of the proxy, or not."""
    proxy = FaultProxy(redis.port)
    await proxy.start()

    @asynccontextmanager
    async def client(through):
        port = proxy.port if through else redis.port
        store = DeadlineStore(RedisStore(RedisServer(f"redis://127.0.0.1:{port}/0")), LIMIT)
        yield store
        await store.close()

    yield proxy, client
    await proxy.close()


@pytest.fixture
async def s3_clients(s3):
    server, proxy = s3

    @asynccontextmanager
    async def client(through):
        port = proxy.port if through else server.port
        settings = ObjectStoreSettings(
            url=server.url,
            endpoint=f"http://127.0.0.1:{port}",
            region="us-east-1",
            credentials_file=server.credentials_file,
            deadline=LIMIT,
            lookup_deadline=LIMIT,
        )
        with ThreadPoolExecutor(1) as threads:
            store = open_object_store(settings, server.url, threads)
            yield store
            await store.close()

    return proxy, client


@pytest.fixture
def clients(request):
    return request.getfixturevalue(f"{request.param}_clients")


async def put(store):
    await store.put_if_absent(NEW, [DATA[:100], DATA[100:]])


async def delete(store):
    await store.delete(OLD)


async def store_anew(store):
    """As when a chunk gets tags, or is compressed."""
    await store.delete(OLD)
    await store.put_if_absent(OLD, [DATA])


async def publish(store):
    await SharedRules(store, SCOPE, lambda: 99).publish(AFTER)


async def prepare(store):
    for name in (OLD, NEW):
        await store.delete(name)
    await store.put_if_absent(OLD, [DATA])
    async for item in store.items():
        if item.key != OLD:
            await store.delete(item.key)
    await SharedRules(store, SCOPE, lambda: 99).publish(BEFORE)


async def points(proxy, client, operation):
    """Before, amid and after each piece."""
    async with client(False) as direct:
        await prepare(direct)
    async with client(True) as store:
        proxy.turn(Pass())
        await operation(store)
        found, total = {0}, 0
        for size in proxy.sent:
            found |= {total + size // 2, total + size}
            total += size
    return sorted(found)


async def whole(store, name):
    length, data = await read_all(store, name, len(DATA))
    assert length is None or (length, data) == (len(DATA), DATA), "a torn object is served"
    return length is not None


OPERATIONS = {
    "put": (put, {OLD}),
    "delete": (delete, set()),
    "store anew": (store_anew, set()),
    "publish": (publish, {OLD}),
}


@pytest.mark.parametrize(
    ("clients", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.full] if (kind, name) == ("s3", "publish") else [])
        for kind in ("redis", "s3")
        for name in OPERATIONS
    ],
    indirect=["clients"],
)
async def test_a_client_killed_anywhere_leaves_objects_whole_or_not_there(clients, name):
    operation, kept = OPERATIONS[name]
    proxy, client = clients
    places = await points(proxy, client, operation)
    assert len(places) > 3
    async with client(False) as direct:
        for point in places:
            await prepare(direct)
            async with client(True) as store:
                proxy.turn(Die(point))
                with suppress(TierError, StorageFull):
                    await operation(store)
                proxy.turn(Pass())
            there = {name for name in (OLD, NEW) if await whole(direct, name)}
            assert there >= kept
            rules = await SharedRules(direct, SCOPE, lambda: 99).read()
            assert rules in (BEFORE, AFTER)
            # The next one finds nothing in its way.
            await operation(direct)
            assert await whole(direct, NEW) or operation is not put
            assert operation is not publish or (await SharedRules(direct, SCOPE, lambda: 99).read() == AFTER)
