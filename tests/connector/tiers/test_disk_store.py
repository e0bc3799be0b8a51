"""Files on disk: the contract, crashes at any point, limits, and who owns the folder."""

import errno
import fcntl
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvist_connector.errors import ConfigError, StorageFull, TierError
from kvist_connector.testing.chunk_store import ChunkStoreSuite, key, read_all
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.faulty import FaultyStore
from kvist_connector.tiers.metered import MeteredStore

LIMIT = 1 << 20


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
async def disk(tmp_path: Path, threads: ThreadPoolExecutor) -> AsyncIterator[DiskStore]:
    store = await DiskStore.open(tmp_path, LIMIT, "none", threads)
    yield store
    await store.close()


class TestDisk(ChunkStoreSuite):
    @pytest.fixture
    def store(self, disk: DiskStore) -> ChunkStore:
        return disk


class TestDiskSynced(ChunkStoreSuite):
    @pytest.fixture
    async def store(self, tmp_path: Path, threads: ThreadPoolExecutor) -> AsyncIterator[ChunkStore]:
        store = await DiskStore.open(tmp_path, LIMIT, "data", threads)
        yield store
        await store.close()


class TestWrapped(ChunkStoreSuite):
    """Wrappers change nothing that the contract promises."""

    @pytest.fixture
    def store(self, disk: DiskStore) -> ChunkStore:
        return MeteredStore(DeadlineStore(FaultyStore(disk), limit=30), lambda *figures: None)


async def test_objects_survive_a_restart_and_count_against_the_limit(tmp_path, threads):
    first = await DiskStore.open(tmp_path, LIMIT, "none", threads)
    await first.put_if_absent(key(1), [b"x" * 600_000])
    await first.close()
    second = await DiskStore.open(tmp_path, LIMIT, "none", threads)
    assert (await second.capacity()).used == 600_000
    with pytest.raises(StorageFull):
        await second.put_if_absent(key(2), [b"y" * 600_000])
    assert (await read_all(second, key(1), 1))[0] == 600_000
    await second.close()


async def test_the_limit_holds_while_writes_are_in_flight(disk):
    import asyncio

    results = await asyncio.gather(
        *(disk.put_if_absent(key(number), [b"x" * 300_000]) for number in range(8)), return_exceptions=True
    )
    stored = [result for result in results if result is True]
    assert len(stored) == 3
    assert all(isinstance(result, StorageFull) for result in results if result is not True)
    assert (await disk.capacity()).used == 900_000


@pytest.mark.parametrize("failing", ["open", "writev", "fdatasync", "rename"])
async def test_a_write_that_fails_anywhere_leaves_nothing(tmp_path, threads, monkeypatch, failing):
    store = await DiskStore.open(tmp_path, LIMIT, "data", threads)
    real = getattr(os, failing)

    def broken(*arguments, **options):
        if failing == "open" and not str(arguments[0]).endswith(".partial"):
            return real(*arguments, **options)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, failing, broken)
    with pytest.raises(TierError):
        await store.put_if_absent(key(1), [b"data"])
    monkeypatch.undo()
    assert (await read_all(store, key(1), 4))[0] is None
    assert not list(tmp_path.glob("??/*"))
    assert (await store.capacity()).used == 0
    assert await store.put_if_absent(key(1), [b"data"])
    await store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_is_a_state_of_its_own(disk, monkeypatch, code):
    def full(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StorageFull):
        await disk.put_if_absent(key(1), [b"data"])
    assert (await disk.capacity()).used == 0


async def test_short_writes_are_continued(disk, monkeypatch):
    real = os.writev

    def short(fd, views):
        return real(fd, [views[0][:7]])

    monkeypatch.setattr(os, "writev", short)
    await disk.put_if_absent(key(1), [b"abcdefghij", b"klmnopqrstuvw"])
    assert await read_all(disk, key(1), 23) == (23, b"abcdefghijklmnopqrstuvw")


async def test_what_a_crash_left_half_written_is_removed_at_start(tmp_path, threads):
    store = await DiskStore.open(tmp_path, LIMIT, "none", threads)
    await store.put_if_absent(key(1), [b"whole"])
    await store.close()
    folder = next(tmp_path.glob("??"))
    partial = folder / "00000000000000000000000000000002.kvist.abc.partial"
    partial.write_bytes(b"half")
    (folder / "notes.txt").write_text("not ours")
    (folder / "zz.kvist").write_text("no key")
    store = await DiskStore.open(tmp_path, LIMIT, "none", threads)
    assert not partial.exists()
    assert [item.key async for item in store.items()] == [key(1)]
    assert (folder / "notes.txt").exists()
    await store.close()


async def test_a_second_agent_on_the_folder_is_refused(tmp_path, threads, disk):
    with pytest.raises(ConfigError, match="another agent"):
        await DiskStore.open(tmp_path, LIMIT, "none", threads)


async def test_a_folder_that_cannot_be_made_is_refused(tmp_path, threads):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk\.path"):
        await DiskStore.open(tmp_path / "file" / "sub", LIMIT, "none", threads)


async def test_what_is_no_file_or_cannot_be_deleted_stays_and_the_rest_is_found(
    tmp_path, threads, monkeypatch, caplog
):
    store = await DiskStore.open(tmp_path, LIMIT, "none", threads)
    await store.put_if_absent(key(1), [b"whole"])
    await store.close()
    folder = next(tmp_path.glob("??"))
    (folder / "x.partial").mkdir()
    stuck = folder / "y.partial"
    stuck.write_bytes(b"half")
    (folder / f"{key(2).hex()}.kvist").mkdir()
    os.mkfifo(folder / f"{key(3).hex()}.kvist")
    (folder / f"{key(4).hex()}.kvist").symlink_to(folder / "gone")
    real = os.unlink

    def denied(path, **options):
        if path == stuck:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", denied)
    store = await DiskStore.open(tmp_path, LIMIT, "none", threads)
    assert [item.key async for item in store.items()] == [key(1)]
    assert (await store.capacity()).used == 5
    assert stuck.exists()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["disk tier"]
    await store.close()


async def test_what_links_lead_to_is_neither_counted_nor_deleted(tmp_path, threads):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for folder in (root, elsewhere):
        folder.mkdir()
    theirs = [elsewhere / f"{key(1).hex()}.kvist", elsewhere / "notes.partial"]
    for path in theirs:
        path.write_bytes(b"theirs")
    (root / key(1).hex()[:2]).symlink_to(elsewhere)
    other = bytes([255]) * 16
    (root / "ff").mkdir()
    (root / "ff" / f"{other.hex()}.kvist").symlink_to(theirs[0])
    store = await DiskStore.open(root, LIMIT, "none", threads)
    assert [item async for item in store.items()] == []
    assert (await store.capacity()).used == 0
    assert all(path.exists() for path in theirs)
    await store.close()


async def test_a_folder_that_cannot_be_locked_is_refused(tmp_path, threads, monkeypatch):
    def unlockable(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unlockable)
    with pytest.raises(ConfigError, match=r"disk\.path: .* cannot be locked"):
        await DiskStore.open(tmp_path, LIMIT, "none", threads)
