"""Agents that add tags to one shared chunk at the same moment: all of them are kept, whoever comes when."""

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import LocalStore, MemoryStore

from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.shared import ROOT, SharedTier
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing import services
from kvist_connector.testing.chunk_store import key
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.envelope import EnvelopeStore
from kvist_connector.tiers.folder_store import FolderStore
from kvist_connector.tiers.object_store import ObjectStore
from kvist_connector.tiers.redis import RedisStore
from kvist_connector.tiers.redis_server import RedisServer
from kvist_connector.tiers.wrapper import WrapperStore

FINGERPRINT = b"f" * 32
BODY = bytes(range(250)) * 4
PARTS = [memoryview(BODY)]
DEADLINE = 60.0
WRITERS = ("a", "b", "c")


class Turns:
    """Who goes on next when all wait: the order is given, then round."""

    def __init__(self, order):
        self._order = iter([*order, *itertools.islice(itertools.cycle(range(3)), 200)])
        self._waiting = {}
        self._changed = asyncio.Event()

    async def mine(self, name):
        self._waiting[name] = asyncio.get_running_loop().create_future()
        self._changed.set()
        await self._waiting[name]

    async def play(self, works):
        """All works, step by step."""
        tasks = [asyncio.create_task(work) for work in works]
        for task in tasks:
            task.add_done_callback(lambda _: self._changed.set())
        while left := sum(not task.done() for task in tasks):
            while len(self._waiting) < left:
                self._changed.clear()
                await self._changed.wait()
                left = sum(not task.done() for task in tasks)
            if self._waiting:
                names = sorted(self._waiting)
                self._waiting.pop(names[next(self._order) % len(names)]).set_result(None)
        return [task.result() for task in tasks]


class Stepping(WrapperStore):
    """Each read and each change waits for its turn once `turns` are given."""

    def __init__(self, inner, name):
        super().__init__(inner)
        self._name = name
        self.turns = None

    async def _step(self):
        if self.turns is not None:
            await self.turns.mine(self._name)

    async def get(self, read):
        await self._step()
        return await self.inner.get(read)

    async def put_if_absent(self, key, parts):
        await self._step()
        return await self.inner.put_if_absent(key, parts)

    async def replace(self, key, seen, parts):
        await self._step()
        return await self.inner.replace(key, seen, parts)

    async def delete(self, key):
        await self._step()
        return await self.inner.delete(key)


class Writer:
    """The shared tier of one agent."""

    def __init__(self, name, store, threads):
        self.name = name
        self.catalog = Catalog("lru", [Tier.REDIS])
        self.store = Stepping(store, name)
        envelope = EnvelopeStore(self.store, threads)
        self.tier = SharedTier(
            Tier.REDIS, envelope, self.catalog, Busy(), time.monotonic, lambda: len(BODY), DEADLINE
        )

    async def begin(self):
        self.tier.serve(FINGERPRINT)
        while self.tier.closed:
            await self.tier.reopened()

    async def knows(self):
        """It has found the chunk, and a request with a tag of its own has used it."""
        assert await self.tier.find([key(1)], ROOT, 0) == 1
        self.catalog.tag(self.catalog.get(key(1)), (self.name,))

    async def tells(self):
        return await self.tier.retag(self.catalog.get(key(1)), PARTS)

    async def stored(self):
        """Tags as they lie in the store; None when the chunk does not."""
        assert await self.tier.find([key(1)], ROOT, 0) <= 1
        header = await self.tier.header(self.catalog.get(key(1)))
        return None if header is None else set(header.tags)


async def raced(stores, order=None):
    """The tags of a chunk after three agents have added one each, in this order or all at once."""
    with ThreadPoolExecutor(1) as threads:
        writers = [Writer(name, store, threads) for name, store in zip(WRITERS, stores, strict=True)]
        for writer in writers:
            await writer.begin()
        first = Chunk(key(1), ROOT, 0, len(BODY), tags=("first",))
        assert (await writers[0].tier.store(first, PARTS)).there
        for writer in writers:
            await writer.knows()
        works = [writer.tells() for writer in writers]
        if order is None:
            assert all(await asyncio.gather(*works))
        else:
            turns = Turns(order)
            for writer in writers:
                writer.store.turns = turns
            assert all(await turns.play(works))
            for writer in writers:
                writer.store.turns = None
        found = await writers[0].stored()
        await writers[0].store.inner.delete(FINGERPRINT[:16] + key(1))
        for writer in writers:
            await writer.tier.close()
    return found


ALL = {"first", *WRITERS}


@given(st.lists(st.integers(0, 2), max_size=16))
@settings(max_examples=60)
def test_in_any_order_of_steps_no_tag_is_lost(order):
    async def play():
        with ThreadPoolExecutor(1) as threads:
            backend = MemoryStore()
            stores = [ObjectStore(backend, "memory", threads) for _ in WRITERS]
            assert await raced(stores, order) == ALL

    asyncio.run(play())


async def test_no_tag_is_lost_in_a_shared_folder(tmp_path):
    with ThreadPoolExecutor(3) as threads:
        stores = [FolderStore(LocalStore(tmp_path), "folder", threads) for _ in WRITERS]
        for order in itertools.islice(itertools.product(range(3), repeat=4), 0, 81, 7):
            assert await raced(stores, order) == ALL
        for _ in range(10):
            assert await raced(stores) == ALL


async def redis_stores(server) -> list[ChunkStore]:
    return [RedisStore(RedisServer(server.url)) for _ in WRITERS]


@pytest.mark.skipif(services.redis_binary() is None, reason="redis-server is not installed")
@pytest.mark.timeout(120)
async def test_no_tag_is_lost_at_a_real_redis(tmp_path):
    server = services.RedisProcess(tmp_path)
    await server.start()
    try:
        for order in itertools.islice(itertools.product(range(3), repeat=4), 0, 81, 7):
            assert await raced(await redis_stores(server), order) == ALL
        for _ in range(10):
            assert await raced(await redis_stores(server)) == ALL
    finally:
        await server.kill()
