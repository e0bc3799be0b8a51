"""A store whose calls do not come back: its callers keep their buffers, nobody else waits for it."""

import asyncio
import time

import pytest

from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.deletion_log import DeletionLog
from kvist_connector.agent.own import OwnTier
from kvist_connector.errors import TierError
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.chunk_store import ChunkStoreSuite, key
from kvist_connector.tiers.base import ChunkStore, Read
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import EnvelopeStore
from kvist_connector.tiers.faulty import FaultyStore
from kvist_connector.tiers.hang import HangGuard

LIMIT = 1 << 20
WAIT = 60
BODY = 1000
OLD = b"o" * 32


@pytest.fixture
async def faulty(tmp_path, threads):
    store = FaultyStore(await DiskStore.open(tmp_path, LIMIT, "none", threads))
    yield store
    await store.close()


class TestGuarded(ChunkStoreSuite):
    """A guard changes nothing that the contract promises."""

    @pytest.fixture
    def store(self, faulty) -> ChunkStore:
        return HangGuard(faulty, limit=WAIT, most=2)


def changes_of(guard):
    told = asyncio.Queue()
    guard.on_change = lambda: told.put_nowait(guard.hangs)
    return told


async def test_whoever_comes_later_or_waits_is_turned_away_until_the_last_has_come_back(faulty):
    guard = HangGuard(faulty, limit=0.05, most=2)
    told = changes_of(guard)
    await guard.put_if_absent(key(1), [b"data"])
    faulty.gate.clear()
    into = bytearray(4)
    async with asyncio.timeout(WAIT):
        hung = [asyncio.create_task(guard.get(Read(key(1), [memoryview(into)]))) for _ in range(2)]
        waiting = asyncio.create_task(guard.get(Read(key(1), ())))
        assert await told.get()
        with pytest.raises(TierError, match=r"have not come back after 0\.05 s"):
            await waiting
        for attempt in (guard.probe(), guard.put_if_absent(key(2), [b"x"]), guard.delete(key(1))):
            with pytest.raises(TierError, match="have not come back"):
                await attempt
        assert "have not come back" in guard.problem
        # The buffer is theirs as long as a thread may write into it.
        assert not any(task.done() for task in hung)
        faulty.gate.set()
        assert await asyncio.gather(*hung) == [4, 4]
        assert not await told.get()
        assert not guard.problem
        assert await guard.put_if_absent(key(2), [b"x"])


async def test_calls_that_wait_for_their_turn_get_it_and_those_given_up_lose_none(faulty):
    guard = HangGuard(faulty, limit=WAIT, most=1)
    faulty.gate.clear()
    first, given_up, last = (asyncio.create_task(guard.delete(key(number))) for number in range(3))
    await asyncio.wait([given_up], timeout=0)
    given_up.cancel()
    faulty.gate.set()
    async with asyncio.timeout(WAIT):
        assert [await first, await last] == [False, False]
        assert await guard.delete(key(3)) is False


async def test_a_tier_that_hangs_offers_nothing_and_all_of_it_again_afterwards(
    faulty, threads, caplog, tmp_path
):
    guard = HangGuard(faulty, limit=0.05, most=2)
    catalog = Catalog("lru", [Tier.DISK])
    log = DeletionLog(tmp_path / "arena")
    tier = OwnTier(Tier.DISK, EnvelopeStore(guard, threads), LIMIT, catalog, Busy(), time.monotonic, log)
    tier.serve(OLD)
    for number in (1, 2, 3):
        chunk = Chunk(key(number), key(0), 0, BODY)
        assert (await tier.store(chunk, [memoryview(bytes([number]) * BODY)])).there
    noticed, told = guard.on_change, changes_of(guard)
    recorded = guard.on_change
    guard.on_change = lambda: (noticed(), recorded())
    faulty.gate.clear()
    buffer = bytearray(BODY)
    async with asyncio.timeout(WAIT):
        hung = asyncio.create_task(tier.fetch(key(1), [memoryview(buffer)]))
        assert await told.get()
        assert catalog.keys(Tier.DISK) == []
        assert tier.problem
        # What is cleared meanwhile does not come back.
        assert tier.drop(key(3)) is not None
        faulty.gate.set()
        await hung
        assert not await told.get()
        assert sorted(catalog.keys(Tier.DISK)) == [key(1), key(2)]
        assert bytes(buffer) == bytes([1]) * BODY
        assert not tier.problem
    await tier.settled()
