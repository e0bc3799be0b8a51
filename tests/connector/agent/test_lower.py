"""A lower tier shared by models over time: foreign chunks are never served and are the first to go."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.deletion_log import DeletionLog
from kvist_connector.agent.own import OwnTier
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.chunk_store import key
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import EnvelopeStore

OLD, NEW = b"o" * 32, b"n" * 32
BODY = 1000
STORED = BODY + 4096


@pytest.fixture
async def tier(tmp_path):
    """Opens the folder anew, as a restarted agent does."""
    opened = []

    async def begin(fingerprint, limit=3 * STORED):
        for lower, _ in opened:
            await lower.close()
        opened.clear()
        catalog = Catalog("lru", [Tier.DISK])
        store = EnvelopeStore(await DiskStore.open(tmp_path, limit, "none", threads), threads)
        log = DeletionLog(tmp_path / "arena")
        lower = OwnTier(Tier.DISK, store, limit, catalog, Busy(), time.monotonic, log)
        opened.append((lower, catalog))
        lower.serve(fingerprint)
        await lower.scan()
        return lower, catalog

    with ThreadPoolExecutor(2) as threads:
        yield begin
        for lower, _ in opened:
            await lower.close()


async def put(lower, number, parent=0, index=0):
    chunk = Chunk(key(number), key(parent), index, BODY)
    return (await lower.store(chunk, [memoryview(bytes([number]) * BODY)])).there


async def fetch(lower, number):
    buffer = bytearray(BODY)
    assert await lower.fetch(key(number), [memoryview(buffer)])
    return bytes(buffer)


async def test_own_chunks_are_found_again_with_their_chain(tier):
    lower, _ = await tier(OLD)
    assert await put(lower, 1)
    assert await put(lower, 2, parent=1, index=1)
    lower, catalog = await tier(OLD)
    chunk = catalog.get(key(2))
    assert (chunk.parent, chunk.index) == (key(1), 1)
    assert await fetch(lower, 2) == bytes([2]) * BODY


async def test_a_folder_of_many_chunks_is_learned_whole(tier):
    lower, _ = await tier(OLD, limit=200 * STORED)
    for number in range(1, 151):
        assert await put(lower, number)
    _, catalog = await tier(OLD, limit=200 * STORED)
    assert len(catalog) == 150


async def test_foreign_chunks_are_hidden_first_to_go_and_come_back_if_still_there(tier):
    lower, _ = await tier(OLD)
    for number in (1, 2):
        assert await put(lower, number)
    lower, catalog = await tier(NEW)
    assert len(catalog) == 0
    assert await put(lower, 11)
    assert await put(lower, 12)
    assert len(catalog) == 2
    assert lower.counts["evicted"] == 1
    lower.serve(OLD)
    assert len(catalog) == 1
    (back,) = catalog.keys(Tier.DISK)
    assert await fetch(lower, int.from_bytes(back, "big")) == bytes([back[-1]]) * BODY


async def test_a_cut_file_is_counted_and_deleted_at_start(tier, tmp_path):
    lower, _ = await tier(OLD)
    await put(lower, 1)
    path = next(tmp_path.glob("??/*.kvist"))
    path.write_bytes(path.read_bytes()[:-1])
    lower, catalog = await tier(OLD)
    await lower.settled()
    assert len(catalog) == 0
    assert lower.counts["corrupt"] == 1
    assert not path.exists()


async def test_a_chunk_above_the_limit_is_refused(tier):
    lower, catalog = await tier(OLD, limit=STORED - 1)
    assert not await put(lower, 1)
    assert lower.counts["write_refused"] == 1
    assert len(catalog) == 0


async def test_dropping_all_and_storing_again_at_once_keeps_the_new_file(tier):
    lower, catalog = await tier(OLD)
    await put(lower, 1)
    assert lower.drop_all() == (1, STORED)
    assert await put(lower, 1)
    await lower.settled()
    assert await fetch(lower, 1) == bytes([1]) * BODY
    assert catalog.keys(Tier.DISK) == [key(1)]


def deny_deletion(monkeypatch):
    def denied(*arguments, **options):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "unlink", denied)


async def test_a_full_tier_that_cannot_delete_keeps_its_chunks_and_works_again_afterwards(tier, monkeypatch):
    lower, catalog = await tier(OLD, limit=20 * STORED)
    for number in range(1, 21):
        assert await put(lower, number)
    with monkeypatch.context() as patch:
        deny_deletion(patch)
        for number in range(101, 131):
            assert not await put(lower, number)
    assert len(catalog) >= 12
    for number in range(131, 151):
        assert await put(lower, number)
    assert len(catalog) == 20
    lower, catalog = await tier(OLD, limit=20 * STORED)
    assert len(catalog) == 20


async def test_one_file_that_cannot_be_deleted_hinders_no_eviction(tier, monkeypatch):
    lower, catalog = await tier(OLD)
    for number in (1, 2, 3):
        assert await put(lower, number)
    real = os.unlink

    def denied(path, **options):
        if key(1).hex() in str(path):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", denied)
    stored = [await put(lower, number) for number in range(11, 16)]
    assert stored == [False, True, True, True, True]
    assert len(catalog) == 2


async def test_a_spoiled_file_that_cannot_be_deleted_is_not_taken_for_the_chunk(tier, tmp_path, monkeypatch):
    lower, _ = await tier(OLD)
    await put(lower, 1)
    path = next(tmp_path.glob("??/*.kvist"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with monkeypatch.context() as patch:
        deny_deletion(patch)
        assert await lower.fetch(key(1), [memoryview(bytearray(BODY))]) is None
        await lower.settled()
        assert not await put(lower, 1)
    assert await put(lower, 1)
    assert await fetch(lower, 1) == bytes([1]) * BODY


async def test_files_that_somebody_removed_are_stored_again_and_take_no_room(tier, tmp_path):
    lower, catalog = await tier(OLD)
    for number in (1, 2, 3):
        assert await put(lower, number)
    for path in tmp_path.glob("??/*.kvist"):
        path.unlink()
    for number in (1, 2, 3):
        assert await lower.fetch(key(number), [memoryview(bytearray(BODY))]) is None
    assert len(catalog) == 0
    for number in (1, 11, 12):
        assert await put(lower, number)
    assert lower.counts["evicted"] == 0
    assert await fetch(lower, 1) == bytes([1]) * BODY
