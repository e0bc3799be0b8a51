"""A folder that several machines share: changes that exclude each other, however their makers end."""

import asyncio
import contextlib
import errno
import fcntl
import logging
import multiprocessing
import os
import signal

import pytest
from obstore.store import LocalStore

from kvist_connector.errors import TierError
from kvist_connector.testing.chunk_store import key, read_all
from kvist_connector.tiers import folder_store
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.folder_store import FolderStore

pytestmark = pytest.mark.timeout(120)
KEY = b"model-state-16-b" + key(1)
NEW = b"new" * 100_000


@pytest.fixture
def opened(tmp_path, threads):
    """Stores of agents over one folder."""

    def begin(label: str = "folder") -> FolderStore:
        return FolderStore(LocalStore(tmp_path / "shared", mkdir=True), label, threads)

    return begin


async def left(store: ChunkStore) -> bytes | None:
    size, data = await read_all(store, KEY, len(NEW))
    return None if size is None else bytes(data[:size])


async def test_of_replacements_at_once_one_is_made_and_a_reader_sees_whole_ones(opened):
    stores = [opened() for _ in range(4)]
    bodies = [bytes([number]) * 200_000 for number in range(4)]
    assert await stores[0].put_if_absent(KEY, [b"head, old"])
    works = [store.replace(KEY, b"head", [body]) for store, body in zip(stores, bodies, strict=True)]
    done = asyncio.gather(*works)
    seen = {await left(stores[0])}
    while not done.done():
        seen.add(await left(stores[0]))
    assert sorted(await done) == [False, False, False, True]
    last = bodies[done.result().index(True)]
    assert await left(stores[0]) == last
    assert seen <= {b"head, old", last}


async def test_nothing_is_deleted_between_the_look_and_the_replacement(opened, monkeypatch):
    """It would come back by that."""
    one, other = opened(), opened()
    await one.put_if_absent(KEY, [b"head"])
    put, deleted = folder_store.obstore.put, []

    async def delete() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                deleted.append(await other.delete(KEY))

    def replaced_by(*given, **options):
        asyncio.run(delete())  # in the thread of the replacement
        return put(*given, **options)

    monkeypatch.setattr(folder_store.obstore, "put", replaced_by)
    assert await one.replace(KEY, b"head", [NEW])
    assert not deleted
    assert await other.delete(KEY)
    assert await left(one) is None


def hold(path, held) -> None:
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    held.set()
    signal.pause()


async def test_a_holder_that_hangs_costs_a_deadline_and_one_that_dies_nothing(opened, tmp_path):
    store = opened()
    await store.put_if_absent(KEY, [b"head"])
    assert not await store.replace(KEY, b"another", [NEW])
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=hold, args=(tmp_path / "shared" / ".replacing", held))
    holder.start()
    try:
        assert await asyncio.to_thread(held.wait, 60)
        with pytest.raises(TierError, match="no answer within"):
            await DeadlineStore(store, 0.05).replace(KEY, b"head", [NEW])
        waiting = asyncio.create_task(store.replace(KEY, b"head", [NEW]))
    finally:
        holder.kill()
        holder.join(60)
    assert await waiting
    assert await left(store) == NEW
    assert [item.key async for item in store.items()] == [KEY]


async def test_a_file_system_without_locks_is_said_once(opened, monkeypatch, caplog):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    store = opened("file:///shared")
    await store.put_if_absent(KEY, [b"head"])
    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        assert await store.replace(KEY, b"head", [NEW])
        assert await store.delete(KEY)
        assert not await store.delete(KEY)
    assert caplog.text.count("file:///shared: its file system has no locks") == 1


async def test_nothing_is_replaced_or_deleted_where_the_folder_is_gone(opened, tmp_path):
    store = opened()
    (tmp_path / "shared").rmdir()
    assert not await store.replace(KEY, b"head", [NEW])
    assert not await store.delete(KEY)
