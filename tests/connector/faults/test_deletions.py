"""What was cleared stays away, whatever becomes of its deletion; a hung disk comes back with its pins."""

import asyncio
import errno
import threading
from pathlib import Path

import pytest
from aiohttp import ClientResponseError

from kvist_connector.agent import edits, own
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.whole_agent import DEADLINE, keys_of
from kvist_connector.tiers import disk
from kvist_connector.tiers.hang import guard_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def settings(tmp_path):
    return {"disk": {"path": tmp_path / "disk", "size": "10Mi", "compression": "none"}}


@pytest.fixture
async def agent(start, settings):
    found = await start("one", **settings)
    await found.computed(keys_of(4))
    await found.written()
    return found


UNLINK = Path.unlink


def refused(path, missing_ok=False):
    if path.suffix == ".kvist":
        raise OSError(errno.EROFS, "Read-only file system", str(path))
    UNLINK(path, missing_ok)


def chunks_on(folder):
    return len(list(folder.glob("disk/??/*.kvist")))


async def test_what_a_disk_did_not_delete_is_not_served_after_a_restart(
    start, agent, settings, tmp_path, monkeypatch
):
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refused)
        await agent.post("clear", {})
        assert chunks_on(tmp_path) == 4
        await agent.stop()
        again = await start("one", **settings)
        assert await again.found(keys_of(4)) == []
        assert (await again.stats())["tiers"]["disk"]["chunks"] == 0
        await again.stop()
    last = await start("one", **settings)
    await last.parts.lower[Tier.DISK].settled()
    assert chunks_on(tmp_path) == 0
    # What is stored anew is as good as any, and a restart does not take it for what was cleared.
    await last.computed(keys_of(4))
    await last.written()
    await last.stop()
    assert await (await start("one", **settings)).found(keys_of(4), memory=True)


async def test_clear_of_a_disk_that_hangs_says_so_in_time(agent, tmp_path, monkeypatch):
    goes_on = threading.Event()

    def hung(path, missing_ok=False):
        assert goes_on.wait(DEADLINE)
        UNLINK(path, missing_ok)

    monkeypatch.setattr(own, "DELETING_SECONDS", 0.05)
    monkeypatch.setattr(edits, "DELETING_SECONDS", 0.05)
    monkeypatch.setattr(Path, "unlink", hung)
    with pytest.raises(ClientResponseError) as refusal:
        await agent.post("clear", {})
    assert refusal.value.status == 503
    assert await agent.found(keys_of(4)) == []
    goes_on.set()
    await agent.parts.lower[Tier.DISK].settled()
    assert chunks_on(tmp_path) == 0
    assert (await agent.post("clear", {}))["chunks"] == 0
    await agent.check()


async def test_pins_of_chunks_on_disk_alone_outlast_its_hanging(start, settings, monkeypatch):
    agent = await start("two", lookup_deadline=3, **settings)
    await agent.computed(keys_of(4))
    await agent.written()
    keys = [key.hex() for key in keys_of(4)]
    await agent.post("pin", {"keys": keys, "seconds": 3600})
    goes_on, read = threading.Event(), disk._read
    guard = guard_of(agent.parts.lower[Tier.DISK]._store.inner)

    def hung(path, into, direct):
        assert goes_on.wait(DEADLINE)
        return read(path, into, direct)

    with monkeypatch.context() as slow:
        slow.setattr(disk, "_read", hung)
        slow.setattr(guard, "_limit", 0.1)  # a loaded machine is no hung disk: only from here on
        await agent.post("clear", {"tier": "memory", "pinned": True})
        assert await agent.found(keys_of(4), memory=True) == []
        assert (await agent.stats())["tiers"]["disk"]["problem"]
        assert (await agent.stats())["pinned"] == 4
        goes_on.set()
        async with asyncio.timeout(DEADLINE):
            while (await agent.stats())["tiers"]["disk"]["problem"]:
                pass  # each look is a request that waits for its answer
    found = (await agent.post("lookup", {"keys": keys}))["chunks"]
    assert [chunk.get("pinned") for chunk in found] == [True] * 4
    assert (await agent.post("clear", {"tier": "disk"}))["pinned"] == 4
    assert len(await agent.found(keys_of(4), memory=True)) == 4
    await agent.post("unpin", {"all": True})
    await agent.check()
