"""Draining a replica: routers acknowledge, requests end, chunks are written; else it says what was left."""

import asyncio
import json
import os
import socket
import sys
import threading
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import pytest

from kvist_connector.agent.catalog import Catalog
from kvist_connector.agent.control_socket import control_path
from kvist_connector.agent.drain_command import describe, drain
from kvist_connector.agent.lower import Stored
from kvist_connector.agent.writebehind import WriteBehind
from kvist_connector.errors import AgentGone
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol import feed as messages
from kvist_connector.protocol.framing import FrameDecoder
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine, prompt_keys

DEADLINE = 60.0
PATH = "/v1/kvist/drain"
ACKNOWLEDGE = "/v1/kvist/drain/acknowledge"


@pytest.fixture
async def start(tmp_path):
    """Starts agents that are gone at the end of the test."""
    running = []

    async def begin(**settings):
        agent = await AgentProcess.start(tmp_path, **settings)
        running.append(agent)
        return agent

    yield begin
    for agent in running:
        await agent.terminate()


class Router:
    """A router as far as draining goes: it reads the feed, and acknowledges when the test says so."""

    def __init__(self, agent, name):
        self.agent, self.name = agent, name
        self.flags = asyncio.Queue()

    async def told(self, draining):
        async with asyncio.timeout(DEADLINE):
            while await self.flags.get() is not draining:
                pass

    async def acknowledge(self, in_flight=0):
        status, body = await self.agent.post(ACKNOWLEDGE, {"reader": self.name, "in_flight": in_flight})
        assert status == 200, body
        return body["counted"]

    async def read(self, response):
        decoder = FrameDecoder(messages.FeedMessage)
        async for data in response.content.iter_any():
            for message in decoder.feed(data):
                if isinstance(message, messages.State | messages.Opening):
                    self.flags.put_nowait(message.draining)


@asynccontextmanager
async def router(agent, name="router-0", acknowledges=1):
    url = f"{agent.url}/v1/kvist/feed?reader={name}&acknowledges={acknowledges}"
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        found = Router(agent, name)
        task = asyncio.create_task(found.read(response))
        yield found
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def begin(agent, deadline=DEADLINE):
    """A drain that is waited for."""
    return asyncio.create_task(agent.post(PATH, {"deadline": deadline}))


async def state(agent, **wanted):
    """Wait until the drain waits for exactly this."""
    async with asyncio.timeout(DEADLINE):
        while True:
            _, left = await agent.get(PATH)
            if all(left[name] == value for name, value in wanted.items()):
                return


DONE = {"draining": True, "routers": [], "requests": 0, "chunks": 0, "bytes": 0}


async def test_without_routers_and_requests_a_drain_is_over_at_once(start):
    agent = await start()
    assert await agent.post(PATH, {"deadline": DEADLINE}) == (200, DONE)
    assert (await agent.stats())["draining"]


async def test_routers_are_told_and_waited_for(start):
    agent = await start()
    async with router(agent) as first, router(agent, "router-1") as second:
        await first.told(False)
        await second.told(False)
        waiting = begin(agent)
        await first.told(True)
        await second.told(True)
        await state(agent, routers=["router-0", "router-1"])
        assert await first.acknowledge()
        await state(agent, routers=["router-1"])
        assert not waiting.done()
        assert await second.acknowledge()
        assert await waiting == (200, DONE)


async def test_requests_of_routers_end_first(start):
    agent = await start()
    async with router(agent) as found:
        waiting = begin(agent)
        await found.told(True)
        await found.acknowledge(in_flight=2)
        await state(agent, routers=[], requests=2)
        assert not waiting.done()
        await found.acknowledge(in_flight=0)
        assert await waiting == (200, DONE)


async def test_requests_of_the_engine_end_first(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    engine.scheduler.send(wire.Step(load=wire.EngineLoad(waiting_requests=1, running_requests=2)))
    await state(agent, requests=3)
    waiting = begin(agent)
    await state(agent, draining=True)
    engine.scheduler.send(wire.Step(load=wire.EngineLoad()))
    assert await waiting == (200, DONE)
    await engine.stop()


async def test_an_engine_that_went_away_has_no_requests(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    engine.scheduler.send(wire.Step(load=wire.EngineLoad(running_requests=2)))
    await state(agent, requests=2)
    waiting = begin(agent)
    await engine.stop()
    assert await waiting == (200, DONE)


async def test_readers_that_do_not_acknowledge_and_routers_that_leave_are_not_waited_for(start):
    agent = await start()
    async with router(agent, "tool", acknowledges=0):
        async with router(agent) as found:
            waiting = begin(agent)
            await found.told(True)
            await state(agent, routers=["router-0"])
        assert await waiting == (200, DONE)


async def test_a_router_that_comes_back_acknowledges_anew(start):
    agent = await start()
    async with router(agent, "other"):
        async with router(agent) as found:
            waiting = begin(agent)
            await found.told(True)
            await found.acknowledge()
            await state(agent, routers=["other"])
        async with router(agent) as found:
            await found.told(True)  # in the opening
            await state(agent, routers=["other", "router-0"])
            await found.acknowledge()
            await state(agent, routers=["other"])
    assert await waiting == (200, DONE)


async def test_the_deadline_says_what_was_left(start):
    agent = await start()
    async with router(agent) as found:
        status, left = await agent.post(PATH, {"deadline": 0.05})
        assert (status, left["routers"]) == (200, ["router-0"])
        await found.acknowledge(in_flight=3)
        _, left = await agent.post(PATH, {"deadline": 0.05})
        assert (left["routers"], left["requests"]) == ([], 3)
    assert describe({"draining": True, "routers": ["a"], "requests": 3, "chunks": 2, "bytes": 2**20}) == (
        "at the deadline there were left: routers that have not acknowledged: a; 3 requests running; "
        "2 chunks (1.0 MiB) not written"
    )


async def test_undone_the_routers_are_told_and_who_waits_is_answered(start):
    agent = await start()
    async with router(agent) as found:
        waiting = begin(agent)
        await found.told(True)
        assert (await agent.post(PATH, {"undo": True}))[1]["draining"] is False
        await found.told(False)
        assert (await waiting)[1]["draining"] is False
        assert not await found.acknowledge()  # nothing to acknowledge any more
        waiting = begin(agent)  # an acknowledgement of the drain before does not count
        await found.told(True)
        await state(agent, routers=["router-0"])
        await found.acknowledge()
        assert await waiting == (200, DONE)


async def test_an_acknowledgement_of_nobody_is_not_counted(start):
    agent = await start()
    await agent.post(PATH, {})
    status, body = await agent.post(ACKNOWLEDGE, {"reader": "nobody", "in_flight": 5})
    assert (status, body) == (200, {"counted": False})


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (PATH, {"deadline": -1}, "deadline"),
        (PATH, {"deadline": "soon"}, "deadline"),
        (PATH, {"deadlin": 1}, None),
        (ACKNOWLEDGE, {"reader": "a", "in_flight": -1}, "in_flight"),
        (ACKNOWLEDGE, {"reader": 1, "in_flight": 1}, "reader"),
    ],
)
async def test_wrong_bodies_are_refused_in_words(start, path, body, field):
    agent = await start()
    status, answer = await agent.post(path, body)
    assert status == 400
    assert answer["error"]["field"] == field


async def test_chunks_that_the_disk_lacks_are_written_before_the_drain_is_over(start, tmp_path):
    agent = await start(disk__path=tmp_path / "disk")
    engine = await FakeEngine.start(agent.socket)
    keys = prompt_keys(range(80))
    await engine.store(keys)
    await engine.lookup(keys)
    await agent.post("/v1/kvist/flush", {"deadline": DEADLINE})
    await agent.post("/v1/kvist/clear", {"tier": "disk"})  # what a tier lost is written again
    assert await agent.post(PATH, {"deadline": DEADLINE}) == (200, DONE)
    assert (await agent.stats())["tiers"]["disk"]["chunks"] == len(keys)
    await engine.stop()


class Slots:
    """The memory tier, as far as writing behind needs it."""

    chunk_bytes = 10

    def __init__(self, catalog):
        self.catalog = catalog

    @contextmanager
    def held(self, chunk):
        self.catalog.lease(chunk)
        yield []
        self.catalog.unlease(chunk)


class Recorder:
    """A tier that keeps the order in which it got chunks; `gate` holds the first."""

    tier = Tier.DISK
    closed = False

    def __init__(self, catalog, room):
        self.catalog, self.room = catalog, room
        self.order = []
        self.gate = asyncio.Event()

    async def store(self, chunk, parts):
        await self.gate.wait()
        self.order.append(chunk.key[0])
        self.catalog.enter_below(self.tier, chunk.key, chunk.parent, chunk.index, 10, 0.0)
        return Stored.WRITTEN


@pytest.mark.parametrize(("room", "order"), [(None, [1, 5, 4, 3, 2]), (30, [1, 5, 4])])
async def test_the_most_valuable_chunks_are_written_first_and_with_them_those_before_them(room, order):
    catalog = Catalog("lru", [Tier.DISK])

    def enter(number, parent, index):
        key = bytes([number]) * 16
        catalog.enter_memory(key, bytes([parent]) * 16, index, 10, wire.SlotRef(number, 1), float(number))

    for number in (1, 2, 3, 4):
        enter(number, 0, 0)
    enter(5, 1, 1)  # the last used one hangs on the one used longest ago
    tier = Recorder(catalog, room)
    writebehind = WriteBehind(Slots(catalog), catalog, {Tier.DISK: tier}, 1000)
    writing = asyncio.create_task(writebehind.run())
    writebehind.hurry()
    tier.gate.set()
    assert await writebehind.flush(DEADLINE)
    assert tier.order == order
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


# ---- the command


async def command(agent, *flags):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvist_connector", "drain", "--socket", str(agent.socket), *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE)
    return process.returncode, out.decode(), err.decode()


async def test_the_command_drains_without_port_and_token(start, tmp_path):
    (tmp_path / "token").write_text("secret")
    agent = await start(http__token_file=tmp_path / "token")
    assert (await agent.post(PATH, {}))[0] == 401
    assert await command(agent, "--deadline", "60") == (0, "kvist drain: done\n", "")
    assert await command(agent, "--undo") == (0, "kvist drain: taken back, requests are welcome\n", "")
    assert control_path(agent.socket).stat().st_mode & 0o777 == 0o600


async def test_the_command_succeeds_at_the_deadline_and_says_what_was_left(start):
    agent = await start()
    async with router(agent):
        status, out, _ = await command(agent, "--deadline", "0.1")
    assert status == 0
    assert (
        out == "kvist drain: at the deadline there were left: routers that have not acknowledged: router-0\n"
    )


async def test_a_path_too_long_for_the_control_socket_stops_no_agent(tmp_path):
    folder = tmp_path / ("x" * (107 - len(str(tmp_path)) - len("//agent.sock")))
    folder.mkdir()
    assert len(str(folder / "agent.sock")) == 107
    agent = await AgentProcess.start(folder)
    assert await agent.post(PATH, {"deadline": DEADLINE}) == (200, DONE)
    assert not control_path(agent.socket).exists()
    assert await agent.terminate() == 0


def test_without_an_agent_the_command_fails_in_words(tmp_path):
    times = iter(range(1000))
    with pytest.raises(AgentGone, match="no agent answers"):
        drain(tmp_path / "agent.sock", 3.0, clock=lambda: float(next(times)), pause=lambda seconds: None)


def test_an_agent_that_restarts_in_mid_drain_is_told_again(tmp_path):
    path = control_path(tmp_path / "agent.sock")
    asked = []

    def serve():
        for broken in (True, False):
            with socket.socket(socket.AF_UNIX) as server:
                path.unlink(missing_ok=True)
                server.bind(str(path))
                server.listen()
                ready.set()
                peer, _ = server.accept()
                with peer:
                    request = b""
                    while not request.endswith(b"}"):  # headers and body may come apart
                        request += peer.recv(65536)
                    asked.append(request)
                    if not broken:
                        body = json.dumps(DONE).encode()
                        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    ready = threading.Event()
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(DEADLINE)
    assert drain(tmp_path / "agent.sock", DEADLINE) == DONE
    thread.join(DEADLINE)
    assert len(asked) == 2


# ---- the end of the agent


async def test_a_signal_to_end_leaves_nothing_unwritten_in_the_journal(start):
    agent = await start()
    engine = await FakeEngine.start(agent.socket)
    keys = prompt_keys(range(40))
    await engine.store(keys)
    await engine.lookup(keys)
    await engine.stop()
    assert await agent.terminate() == 0
    again = await start()
    engine = await FakeEngine.start(again.socket)
    assert len((await engine.lookup(keys)).refs) == len(keys)
    await engine.stop()


async def test_the_token_may_change_while_the_agent_runs(start, tmp_path):
    file = tmp_path / "token"
    file.write_text("old")
    agent = await start(http__token_file=file)
    assert (await agent.get(PATH, Authorization="Bearer old"))[0] == 200
    (tmp_path / "new").write_text("new one\n")
    (tmp_path / "new").rename(file)
    assert (await agent.get(PATH, Authorization="Bearer new one"))[0] == 200
    assert (await agent.get(PATH, Authorization="Bearer old"))[0] == 401
    file.write_text("")  # a mistake does not lock everybody out
    assert (await agent.get(PATH, Authorization="Bearer new one"))[0] == 200
