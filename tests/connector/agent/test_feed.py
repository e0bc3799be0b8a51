"""The feed: a reader that applies what it gets always holds the agent's index; a slow one is dropped."""

import asyncio

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.agent.feed import Feed, View
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol import feed as messages
from kvist_connector.protocol.framing import FrameDecoder
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine, layout, prompt_keys

DEADLINE = 20.0


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Index:
    """What the publisher reads of the agent."""

    def __init__(self):
        self.tiers = {Tier.GPU: set(), Tier.MEMORY: set(), Tier.DISK: set()}

    def view(self):
        opening = messages.Opening(
            version=1, epoch=1, replica="r", fingerprint=b"f", group=0, model="m", chunk_tokens=8,
            block_tokens=4, gpu_known=True, draining=False,
        )  # fmt: skip
        return View(
            opening=lambda: opening,
            tiers=lambda: list(self.tiers),
            keys=lambda tier: sorted(self.tiers[tier]),
            speeds=lambda: (),
            chunk_bytes=lambda: 1,
            connected=lambda: True,
        )


class Mirror:
    """A reader as routers are: applies frames, checks the sequence."""

    def __init__(self):
        self._decoder = FrameDecoder(messages.FeedMessage)
        self.opening = None
        self.complete = False
        self.tiers = {}
        self.loads = []
        self.records = []
        self.states = []
        self._sequence = 0

    def apply(self, data):
        for message in self._decoder.feed(data):
            if isinstance(message, messages.Opening):
                self.opening = message
                continue
            self._sequence += 1
            assert message.sequence == self._sequence
            self._one(message)

    def _one(self, message):
        match message:
            case messages.Snapshot():
                self.tiers.setdefault(message.tier, set()).update(split(message.keys))
                self.complete = message.last
            case messages.Delta():
                held = self.tiers.setdefault(message.tier, set())
                held.difference_update(split(message.removed))
                held.update(split(message.added))
            case messages.Load():
                self.loads.append(message)
            case messages.Record():
                self.records.append(message.record)
            case messages.State():
                self.states.append(message)
                if not message.gpu_known:
                    self.tiers[0] = set()


def split(joined):
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]


CHANGES = st.lists(
    st.tuples(st.sampled_from([Tier.MEMORY, Tier.DISK]), st.integers(0, 5), st.booleans()), max_size=30
)


@given(before=CHANGES, after=CHANGES, turns=st.lists(st.booleans(), min_size=60, max_size=60))
def test_snapshot_and_deltas_add_up(before, after, turns):
    async def scenario():
        index = Index()
        feed = Feed(index.view())
        rounds = iter(turns)
        mirror = Mirror()

        async def change(tier, number, added):
            if added != (key(number) in index.tiers[tier]):
                (index.tiers[tier].add if added else index.tiers[tier].discard)(key(number))
                feed.change(tier, key(number), added)
            if next(rounds):
                await asyncio.sleep(0)

        for step in before:
            await change(*step)
        reader = feed.open("a")
        for step in after:
            await change(*step)
        await asyncio.sleep(0)
        mirror.apply(await reader.take())
        assert mirror.complete
        assert {tier: mirror.tiers.get(tier, set()) for tier in index.tiers} == index.tiers
        feed.close()

    asyncio.run(scenario())


async def test_a_slow_reader_is_disconnected_and_others_go_on():
    index = Index()
    feed = Feed(index.view(), buffer_bytes=4096)
    slow, quick = feed.open("slow"), feed.open("quick")
    mirror = Mirror()
    for number in range(1000):
        index.tiers[Tier.MEMORY].add(key(number))
        feed.change(Tier.MEMORY, key(number), True)
        await asyncio.sleep(0)
        mirror.apply(await quick.take())
    assert await slow.take() == b""
    assert feed.readers == 1
    assert feed.overruns == 1
    assert mirror.tiers[Tier.MEMORY] == index.tiers[Tier.MEMORY]
    again = Mirror()
    again.apply(await feed.open("slow").take())
    assert again.tiers[Tier.MEMORY] == index.tiers[Tier.MEMORY]
    feed.close()


async def test_a_reader_of_the_same_name_replaces_the_old_one():
    feed = Feed(Index().view())
    first = feed.open("a")
    await first.take()
    second = feed.open("a")
    assert await first.take() == b""
    feed.leave("a", first)
    assert feed.readers == 1
    feed.leave("a", second)
    assert feed.readers == 0
    feed.close()


async def test_readers_are_bounded():
    feed = Feed(Index().view())
    opened = [feed.open(str(number)) for number in range(70)]
    assert opened[-1] is None
    assert feed.readers == 64
    feed.close()


async def test_unknown_gpu_residency_empties_the_view():
    index = Index()
    feed = Feed(index.view())
    index.tiers[Tier.GPU].add(key(1))
    reader = feed.open("a")
    mirror = Mirror()
    index.tiers[Tier.GPU].clear()
    feed.change(Tier.GPU, key(1), False)
    feed.state(gpu_known=False, draining=False)
    mirror.apply(await reader.take())
    assert mirror.tiers[0] == set()
    assert not mirror.states[-1].gpu_known
    feed.close()


@pytest.fixture
async def agent(tmp_path):
    process = await AgentProcess.start(tmp_path, disk__path=tmp_path / "disk")
    yield process
    await process.terminate()


async def follow(response, mirror, wanted):
    async with asyncio.timeout(DEADLINE):
        while not wanted(mirror):
            data = await response.content.readany()
            assert data, "the stream ended"
            mirror.apply(data)


async def test_a_reader_over_http_sees_commits_records_load_and_the_new_epoch(agent):
    engine = await FakeEngine.start(agent.socket)
    keys = prompt_keys(range(40))
    await engine.store(keys[:3])
    await engine.lookup(keys[:3])
    url = f"{agent.url}/v1/kvist/feed?reader=router"
    async with aiohttp.ClientSession() as client:
        async with client.get(url) as response:
            mirror = Mirror()
            await follow(response, mirror, lambda seen: seen.complete and seen.loads)
            assert mirror.tiers[1] == set(keys[:3])
            assert (mirror.opening.model, mirror.opening.fingerprint) == ("fake", b"f" * 32)
            await engine.store(keys, start=3)
            record = wire.RequestRecord(
                request="q", prompt_tokens=40, last_chunk_key=keys[-1], hit_tokens={1: 24}, arrived=1.0,
                lookup_seconds=0.0, wait_seconds=0.0, load_seconds=0.0, prefill_seconds=0.1,
            )  # fmt: skip
            load = wire.EngineLoad(waiting_requests=3, prefill_seconds_per_token=1e-4)
            engine.scheduler.send(wire.Step(records=(record,), load=load))
            await follow(
                response,
                mirror,
                lambda seen: (
                    seen.records
                    and seen.loads[-1].load.waiting_requests == 3
                    and len(seen.tiers.get(2, ())) == 5
                ),
            )
            assert mirror.tiers[1] == set(keys)
            assert mirror.records == [record]
            assert mirror.loads[-1].engine_connected
            await engine.stop()
            await follow(response, mirror, lambda seen: not seen.loads[-1].engine_connected)
            epoch = mirror.opening.epoch
            other = await FakeEngine.start(agent.socket, layout(b"g" * 32))
            async with asyncio.timeout(DEADLINE):
                while data := await response.content.readany():
                    mirror.apply(data)
        async with client.get(url) as response:
            mirror = Mirror()
            await follow(response, mirror, lambda seen: seen.complete)
            assert mirror.opening.epoch > epoch
            assert mirror.opening.fingerprint == b"g" * 32
            assert not any(mirror.tiers.values())
        await other.stop()
    stats = await agent.stats()
    assert stats["requests"] == 1
    assert stats["hit_tokens"] == {"gpu": 0, "memory": 24, "disk": 0}
