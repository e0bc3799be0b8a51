"""A disk that is full, read-only or broken, and an agent out of file descriptors, on real file systems."""

import asyncio
import errno
import os
import resource
import shutil
import signal
import subprocess
from contextlib import contextmanager

import pytest
from aiohttp import ClientResponseError
from tests.connector.faults.left_behind import whole

from kvist_connector.errors import ConfigError
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_process import AgentProcess, launch
from kvist_connector.testing.fake_engine import FakeEngine
from kvist_connector.testing.whole_agent import DEADLINE, keys_of

pytestmark = pytest.mark.timeout(240)
FILE = 4096 + 16384  # of one chunk
EVENTS = "kvist_agent_tier_events_total"


def mount(*arguments):
    done = subprocess.run(["mount", *map(str, arguments)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine lets us mount nothing: {done.stderr.strip()}")


def unmount(folder):
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small(tmp_path):
    """A file system with room for about ten chunks."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={11 * FILE}", "kvist-test", folder)
    yield folder
    unmount(folder)


@contextmanager
def mounted_read_only(folder):
    mount("--bind", folder, folder)
    try:
        mount("-o", "remount,bind,ro", folder)
        yield
    finally:
        unmount(folder)


async def stocked(start, folder, chunks=6):
    # Compressed, more would fit than these tests count on.
    agent = await start(disk={"path": folder, "size": "10Mi", "compression": "none"})
    await agent.computed(keys_of(chunks))
    await agent.written()
    return agent


async def back(agent, chunks=6):
    """What is on disk is served again, and what comes next is written."""
    await agent.computed(keys_of(chunks + 1), start=chunks)
    await agent.written()
    assert await agent.found(keys_of(chunks + 1)) == [Tier.DISK] * (chunks + 1)
    assert await agent.metric("kvist_agent_tier_answers", tier="disk") == 1
    await agent.check()


async def counted(agent, cause):
    async with asyncio.timeout(DEADLINE):
        while not await agent.metric(EVENTS, tier="disk", reason=cause):
            pass  # each look is a request that waits for its answer


async def test_a_full_file_system_evicts_and_then_refuses(start, small, warnings_of):
    agent = await stocked(start, small)
    filler = small / "filler"
    filler.write_bytes(bytes(os.statvfs(small).f_bavail * os.statvfs(small).f_bsize))
    # Others make room, least valuable first; what the new ones continue does not.
    await agent.computed(keys_of(4, first=1000))
    await agent.written()
    assert await agent.metric(EVENTS, tier="disk", reason="evicted") >= 4
    assert await agent.found(keys_of(4, first=1000)) == [Tier.DISK] * 4
    await agent.computed(keys_of(20, first=2000))
    await agent.written()
    await counted(agent, "write_refused")
    assert warnings_of(Tier.DISK) == {"write_refused": 1}
    filler.unlink()
    await agent.computed(keys_of(6))
    await agent.written()
    await back(agent)


async def test_a_file_system_that_became_read_only_serves_and_takes_nothing(start, small, warnings_of):
    agent = await stocked(start, small)
    with mounted_read_only(small):
        assert await agent.found(keys_of(6)) == [Tier.DISK] * 6
        await agent.computed(keys_of(3, first=1000))
        await counted(agent, "write_failed")
        await agent.written()
    assert warnings_of(Tier.DISK) == {"write_failed": 1}
    await back(agent)


async def test_a_retirement_has_room_on_a_disk_full_of_chunks(start, small):
    agent = await stocked(start, small)
    await agent.computed(keys_of(20, first=2000))
    await agent.written()
    assert os.statvfs(small).f_bavail == 0
    for tag in ("one", "two"):
        assert (await agent.post("retire", {"tag": tag}))["complete"]
    assert await agent.metric(EVENTS, tier="disk", reason="evicted")


async def test_a_retirement_that_a_disk_does_not_take_leaves_no_half_of_a_file(start, small):
    agent = await start(disk={"path": small, "size": "10Mi"})
    (small / "filler").write_bytes(bytes(os.statvfs(small).f_bavail * os.statvfs(small).f_bsize))
    with pytest.raises(ClientResponseError) as refusal:
        await agent.post("retire", {"tag": "a"})
    assert refusal.value.status == 503
    assert sorted(path.name for path in small.iterdir()) == [".lock", "filler"]
    (small / "filler").unlink()
    assert (await agent.post("retire", {"tag": "a"}))["complete"]


async def test_a_folder_that_was_removed_is_made_again_and_still_one_agents(start, tmp_path):
    agent = await stocked(start, tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk")
    assert await agent.found(keys_of(6)) == []
    await agent.computed(keys_of(6))
    await agent.written()
    await back(agent)
    with pytest.raises(ConfigError, match="is used by another agent"):
        await start(disk={"path": tmp_path / "disk", "size": "10Mi"})


async def test_another_file_system_in_the_folders_place_is_not_written_to(start, tmp_path):
    agent = await stocked(start, tmp_path / "disk")
    mount("-t", "tmpfs", "kvist-test", tmp_path / "disk")
    try:
        await agent.computed(keys_of(3, first=1000))
        await agent.until_answers(Tier.DISK, False)
        assert "another file system" in (await agent.stats())["tiers"]["disk"]["problem"]
        with pytest.raises(ClientResponseError) as refusal:
            await agent.post("retire", {"tag": "a"})
        assert refusal.value.status == 503
        assert list((tmp_path / "disk").iterdir()) == []
    finally:
        unmount(tmp_path / "disk")
    await agent.until_answers(Tier.DISK, True)
    await agent.written()
    await back(agent)


async def test_a_file_that_cannot_be_read_is_a_miss_and_stays(start, tmp_path, warnings_of):
    """The kernel answers EIO: nothing is mapped at address 0."""
    agent = await stocked(start, tmp_path / "disk")
    (path,) = (tmp_path / "disk").glob(f"??/{keys_of(6)[2].hex()}.kvist")
    whole = path.rename(tmp_path / "whole")
    path.symlink_to("/proc/self/mem")
    assert await agent.found(keys_of(6)) == [Tier.DISK] * 2
    assert warnings_of(Tier.DISK) == {"read_failed": 1}
    path.unlink()
    whole.rename(path)
    assert await agent.found(keys_of(6)) == [Tier.DISK] * 6
    await back(agent)


async def test_writes_that_fail_are_given_up_and_others_go_on(start, tmp_path, warnings_of, monkeypatch):
    agent = await stocked(start, tmp_path / "disk")

    def broken(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", broken)
        await agent.computed(keys_of(3, first=1000))
        await counted(agent, "write_failed")
        await agent.written()
        assert await agent.found(keys_of(6)) == [Tier.DISK] * 6
    assert warnings_of(Tier.DISK) == {"write_failed": 1}
    await back(agent)


async def test_a_second_agent_on_the_folder_is_refused_and_the_first_goes_on(start, tmp_path):
    first = await stocked(start, tmp_path / "disk")
    with pytest.raises(ConfigError, match=r"disk\.path: .* is used by another agent: choose another folder"):
        await start(disk={"path": tmp_path / "disk", "size": "10Mi"})
    await back(first)
    await first.stop()
    second = await start(disk={"path": tmp_path / "disk", "size": "10Mi"})
    assert await second.found(keys_of(7)) == [Tier.DISK] * 7


@pytest.fixture
async def process(tmp_path):
    """An agent of its own: a limit of file descriptors is one of the whole process."""
    agent = await AgentProcess.start(tmp_path, disk__path=tmp_path / "disk", lookup_deadline=60)
    yield agent
    if agent._process.returncode is None:
        await agent.kill()


async def test_an_agent_without_file_descriptors_misses_and_recovers(process):
    agent = process
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys_of(6))
    await engine.lookup(keys_of(6))
    await agent.post("/v1/kvist/flush", {"deadline": DEADLINE})
    await agent.post("/v1/kvist/clear", {"tier": "memory"})
    before = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        # Nothing can be opened now; the engine's connection is, and is answered.
        assert not (await engine.lookup(keys_of(6))).refs
        await engine.store(keys_of(6))
        assert engine.holds(keys_of(6), await engine.lookup(keys_of(6)))
    finally:
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, before)
    await agent.post("/v1/kvist/flush", {"deadline": DEADLINE})
    assert (await agent.stats())["tier_counters"]["disk"]["read_failed"] >= 1
    await agent.post("/v1/kvist/clear", {"tier": "memory"})
    found = await engine.lookup(keys_of(6))
    assert found.tiers == bytes([Tier.DISK] * 6)
    assert engine.holds(keys_of(6), found)
    assert (await agent.stats())["leases"] == 0
    await engine.stop()
    agent._process.send_signal(signal.SIGTERM)
    _, said = await agent._process.communicate()
    assert said.decode().count("disk tier: read_failed") == 1
    whole(agent.arena)


@pytest.fixture
async def hurried(tmp_path):
    """An agent for which a disk hangs after a second, and that does not wait for it when it ends."""
    agent = await AgentProcess.start(
        tmp_path, disk__path=tmp_path / "disk", disk__deadline=1, lookup_deadline=3, shutdown_deadline=0
    )
    yield agent
    if agent._process.returncode is None:
        await agent.kill()


async def test_a_disk_that_hangs_is_left_alone_and_does_not_keep_the_agent_from_ending(hurried, tmp_path):
    """Opening a pipe for reading waits until somebody writes."""
    agent = hurried
    engine = await FakeEngine.start(agent.socket)
    hung, well = keys_of(6), keys_of(2, first=1000)
    for keys in (hung, well):
        await engine.store(keys)
        await engine.lookup(keys)
    await agent.post("/v1/kvist/flush", {"deadline": DEADLINE})
    await agent.post("/v1/kvist/clear", {"tier": "memory"})
    for key in hung[:4]:
        (path,) = (tmp_path / "disk").glob(f"??/{key.hex()}.kvist")
        path.unlink()
        os.mkfifo(path)
    assert not (await engine.lookup(hung)).refs
    assert "have not come back" in (await agent.stats())["tiers"]["disk"]["problem"]
    # Nothing is promised of it, so nobody waits.
    for keys in (well, hung):
        assert (await engine.lookup(keys)).known == 0
    await engine.stop()
    assert await agent.terminate() == 1
    whole(agent.arena)


async def test_an_agent_that_may_not_remove_its_sockets_ends_in_order(process, tmp_path):
    with mounted_read_only(tmp_path):
        assert await process.terminate() == 0
        refused = await launch(tmp_path)
        _, said = await refused.communicate()
    assert said.decode().startswith("kvist-agent: socket: ")
    assert "Read-only file system" in said.decode()
    again = await AgentProcess.start(tmp_path)
    assert await again.terminate() == 0
