"""Any order of operations, restarts and crashes leaves each real store as a dictionary would be."""

import asyncio
import contextlib
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.testing.chunk_store_machine import ChunkStoreMachine
from kvist_connector.testing.fault_proxy import Die, FaultProxy
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.object_backend import Bucket, open_backend
from kvist_connector.tiers.object_store import ObjectStore
from kvist_connector.tiers.redis import RedisStore
from kvist_connector.tiers.redis_server import RedisServer

pytestmark = pytest.mark.timeout(200)


async def check(machine, examples):
    """In a thread: the machine has a loop of its own, the servers are on ours."""
    plan = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    await asyncio.to_thread(run_state_machine_as_test, machine, settings=plan)


class Disk(ChunkStoreMachine):
    points = ("before the bytes", "amid the bytes", "before the rename", "after the rename")

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.threads = ThreadPoolExecutor(1)

    async def open(self):
        store = await DiskStore.open(self.root, 1 << 20, "none", self.threads)
        assert not list(self.root.glob("??/*.partial"))
        return store

    async def interrupt(self, store, name, data, point):
        write, rename = os.writev, os.rename

        def dying_write(fd, views):
            if point == "amid the bytes":
                write(fd, [views[0][:1]])
            if point in ("before the bytes", "amid the bytes"):
                raise OSError(0, point)
            return write(fd, views)

        def dying_rename(source, target):
            if point == "after the rename":
                rename(source, target)
            raise OSError(0, point)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "writev", dying_write)
            patch.setattr(os, "rename", dying_rename)
            patch.setattr(Path, "unlink", lambda *arguments, **options: None)  # the dead clean up nothing
            with contextlib.suppress(TierError):
                await store.put_if_absent(name, [data])
        await store.close()  # what the kernel does: the lock is free

    def teardown(self):
        super().teardown()
        self.threads.shutdown()
        shutil.rmtree(self.root)


async def test_disk():
    await check(Disk, 30)


# Bytes that a client has sent when it is killed: of the question before, of the object, or never so many.
SENT = ("0", "40", "150", "700", "1500", "5000")


async def killed(port, open_at, name, data, sent):
    """A client that puts the object and dies on the way."""
    proxy = FaultProxy(port)
    await proxy.start()
    store = open_at(proxy.port)
    proxy.turn(Die(int(sent)))
    with contextlib.suppress(TierError, StorageFull):
        await store.put_if_absent(name, [data])
    await store.close()
    await proxy.close()


async def test_redis(redis_server):
    server = await redis_server()

    def open_at(port):
        return RedisStore(RedisServer(f"redis://127.0.0.1:{port}/0"))

    class Redis(ChunkStoreMachine):
        points = SENT
        emptied = False

        async def open(self):
            store = open_at(server.port)
            if not self.emptied:
                await store._client.flushall()
                self.emptied = True
            return store

        async def interrupt(self, store, name, data, point):
            await killed(server.port, open_at, name, data, point)
            await store.close()

    await check(Redis, 8)


async def test_object_store(s3_server, threads):
    server = await s3_server()

    def open_at(port):
        bucket = Bucket(
            server.url,
            endpoint=f"http://127.0.0.1:{port}",
            region="us-east-1",
            credentials_file=server.credentials_file,
        )
        return ObjectStore(open_backend(bucket), server.url, threads)

    class Bucketful(ChunkStoreMachine):
        points = SENT
        emptied = False

        async def open(self):
            store = open_at(server.port)
            if not self.emptied:
                for item in [item async for item in store.items()]:
                    await store.delete(item.key)
                self.emptied = True
            return store

        async def interrupt(self, store, name, data, point):
            await killed(server.port, open_at, name, data, point)
            await store.close()

    await check(Bucketful, 4)
