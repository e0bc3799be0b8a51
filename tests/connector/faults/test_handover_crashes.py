"""Source or target of a move killed at any piece that travels, or between two steps: no chunk is lost."""

import asyncio
import os
import signal
from contextlib import suppress

import aiohttp
import pytest

from kvist_connector import names
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine
from kvist_connector.testing.fault_proxy import FaultProxy
from kvist_connector.testing.ports import free_port
from kvist_connector.testing.whole_agent import keys_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
CHAIN = keys_of(2)
KEYS = [key.hex() for key in CHAIN]
SETTINGS = {"peer__host": "127.0.0.1", "memory": "200Ki"}


class Replica:
    """An agent and its engine, on a folder that outlives them."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.agent = self.engine = None

    async def start(self):
        self.folder.mkdir(exist_ok=True)
        self.agent = await AgentProcess.start(self.folder, peer__port=self.port, **SETTINGS)
        self.engine = await FakeEngine.start(self.agent.socket)

    async def stop(self):
        await self.engine.stop()
        await self.agent.terminate(signal.SIGKILL)

    async def ask(self, path, body):
        status, answer = await self.agent.post(path, body)
        assert status == 200, answer
        return answer

    async def has(self):
        """Keys here, and what is served of them is right."""
        answer = await self.engine.lookup(CHAIN)
        assert self.engine.holds(CHAIN, answer), "wrong bytes"
        found = await self.ask("/v1/kvist/lookup", {"keys": KEYS})
        return {chunk["key"] for chunk in found["chunks"] if chunk["tiers"]}


class Killer:
    """Kills the victim at the n-th thing that happens; counts them."""

    def __init__(self, victim=None, fatal=0):
        self._victim, self._fatal = victim, fatal
        self.events = 0

    def __call__(self):
        self.events += 1
        if self.events == self._fatal:
            os.kill(self._victim.agent.pid, signal.SIGKILL)


async def move(source, target, proxy, killer):
    """The steps of a router."""
    proxy.on_piece = killer

    async def step(replica, path, body):
        killer()
        return await replica.ask(path, body)

    offer = await step(source, names.PATH_OFFER, {"keys": KEYS})
    take = {"source": f"http://127.0.0.1:{proxy.port}", "fingerprint": offer["fingerprint"]}
    await step(target, names.PATH_TAKE, take | {"chunks": offer["chunks"]})
    taken = await step(target, names.PATH_TAKE, take | {"chunks": offer["chunks"], "dry_run": True})
    await step(source, names.PATH_RELEASE, {"keys": taken["there"]})
    killer()


@pytest.fixture
async def pair(tmp_path):
    source, target = Replica(tmp_path / "source"), Replica(tmp_path / "target")
    for replica in (source, target):
        await replica.start()
    proxy = FaultProxy(source.port)
    await proxy.start()
    yield source, target, proxy
    proxy.on_piece = lambda: None
    await proxy.close()
    for replica in (source, target):
        await replica.stop()


async def begin(source, target):
    """The chain is at the source alone."""
    for replica in (source, target):
        await replica.ask("/v1/kvist/clear", {})
    await source.engine.store(CHAIN)
    assert await source.has() == set(KEYS)


@pytest.mark.parametrize("which", ["source", "target"])
async def test_a_replica_killed_anywhere_in_a_move_loses_no_chunk(pair, which):
    source, target, proxy = pair
    await begin(source, target)
    clean = Killer()
    await move(source, target, proxy, clean)
    assert (await source.has(), await target.has()) == (set(), set(KEYS))
    assert clean.events > 6
    victim = source if which == "source" else target
    for fatal in range(1, clean.events + 1):
        await begin(source, target)
        with suppress(AssertionError, aiohttp.ClientError, asyncio.IncompleteReadError):
            await move(source, target, proxy, Killer(victim, fatal))
        proxy.on_piece = lambda: None
        await victim.stop()
        await victim.start()
        assert await source.has() | await target.has() == set(KEYS), f"lost at {fatal}"
        await move(source, target, proxy, Killer())
        assert await target.has() == set(KEYS)
        assert await source.has() == set()
