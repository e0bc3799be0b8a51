"""Several stores as one: where keys lie, and what the failure of one of them means."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from obstore.store import MemoryStore

from kvist_connector.errors import TierError
from kvist_connector.testing.chunk_store import key
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.faulty import FaultyStore
from kvist_connector.tiers.object_store import ObjectStore
from kvist_connector.tiers.spread import SpreadStore

NAMES = ("redis://a:6379/0", "redis://b:6379/0", "redis://c:6379/0")


@pytest.fixture
def stores():
    with ThreadPoolExecutor(1) as threads:
        yield {name: FaultyStore(ObjectStore(MemoryStore(), name, threads)) for name in NAMES}


async def places(stores, count=300):
    spread = SpreadStore(stores)
    for number in range(count):
        await spread.put_if_absent(key(number), [b"x"])
    return {number: name for name, store in stores.items() async for number in _numbers(store)}


async def _numbers(store):
    async for item in store.items():
        yield int.from_bytes(item.key, "big")


async def test_every_store_has_its_share(stores):
    found = list((await places(stores)).values())
    assert all(60 < found.count(name) < 140 for name in NAMES)


async def test_without_a_store_only_its_keys_move(stores):
    before = await places(stores)
    fewer = {name: store for name, store in stores.items() if name != NAMES[1]}
    spread = SpreadStore(fewer)
    sizes = await spread.sizes([key(number) for number in range(300)])
    assert {number for number, size in enumerate(sizes) if size is None} == {
        number for number, name in before.items() if name == NAMES[1]
    }


async def test_the_order_of_the_addresses_does_not_matter(stores):
    before = await places(stores)
    spread = SpreadStore(dict(reversed(stores.items())))
    assert None not in await spread.sizes([key(number) for number in before])


async def test_a_failing_store_fails_for_its_own_keys_only(stores):
    before = await places(stores)
    spread = SpreadStore(
        {name: DeadlineStore(store, 30, failures=1, pause=1000) for name, store in stores.items()}
    )
    stores[NAMES[2]].plan = lambda operation, name: TierError("down")
    for _ in range(2):
        sizes = await spread.sizes([key(number) for number in range(300)])
        failed = {number for number, size in enumerate(sizes) if isinstance(size, TierError)}
        assert failed == {number for number, name in before.items() if name == NAMES[2]}
