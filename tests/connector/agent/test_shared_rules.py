"""What is retired lies in shared tiers too: whoever comes there knows it before anything is read."""

import asyncio
import itertools
import random

import msgspec
import pytest
import xxhash
from obstore.store import MemoryStore

from kvist_connector.agent.shared_rules import PLACES, SharedRules
from kvist_connector.errors import StorageFull, TierError
from kvist_connector.protocol.retired import Retired
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_parts import DEADLINE, AgentParts
from kvist_connector.testing.agent_parts import keys_of as keys
from kvist_connector.testing.fake_engine import FakeEngine
from kvist_connector.tiers.base import ChunkStore, Item, Read

FINGERPRINT = b"f" * 32
NOW = 2**42  # after every epoch of these tests
CHAIN = keys(3)


def rule(number):
    return Retired().with_rule("tag", f"t{number}", number + 1)


def packed(**written):
    body = msgspec.json.encode(written)
    return b"KVISTRET" + xxhash.xxh3_64_digest(body) + body


async def content_of(store, item):
    data = bytearray(item.size)
    await store.get(Read(item.key, [memoryview(data)]))
    return bytes(data)


class SlowStore(ChunkStore):
    """In memory; each call waits some turns of the loop, before and after."""

    def __init__(self, draw=None, backwards=False):
        self.objects = {}
        self._step = -1 if backwards else 1
        self._draw = draw

    async def _wait(self):
        for _ in range(self._draw.choice([0, 0, 1, 3]) if self._draw is not None else 0):
            await asyncio.sleep(0)

    def hurry(self):
        self._draw = None

    @property
    def capabilities(self):
        raise NotImplementedError

    async def get(self, read):
        await self._wait()
        data = self.objects.get(read.key)
        if data is not None and read.into:
            room = read.into[0]
            room[: len(data)] = data[: len(room)]
        await self._wait()
        return None if data is None else len(data)

    async def sizes(self, keys):
        found = []
        for name in keys[:: self._step]:
            await self._wait()
            found.append(len(self.objects[name]) if name in self.objects else None)
        return found[:: self._step]

    async def put_if_absent(self, key, parts):
        await self._wait()
        new = key not in self.objects
        self.objects.setdefault(key, b"".join(parts))
        await self._wait()
        return new

    async def delete(self, key):
        await self._wait()
        there = self.objects.pop(key, None) is not None
        await self._wait()
        return there

    async def items(self, prefix=b""):
        for key, data in self.objects.items():
            yield Item(key, len(data))

    async def capacity(self):
        raise NotImplementedError

    async def close(self):
        pass


async def crowd(seed, writers=5):
    """Writers at the same time, some of whom are killed; how each ended, and the store."""
    draw = random.Random(seed)
    store = SlowStore(draw, backwards=seed % 2)

    async def publish(number):
        """Whoever reads afterwards finds it, whatever others do meanwhile."""
        rules = SharedRules(store, FINGERPRINT, lambda: NOW)
        await rules.publish(rule(number))
        return (await rules.read()).covers(rule(number))

    tasks = [asyncio.create_task(publish(number)) for number in range(writers)]
    for _ in range(draw.randrange(200)):
        await asyncio.sleep(0)
    for number in draw.sample(range(writers), seed % 3):
        tasks[number].cancel()
    return store, await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("seeds", [range(start, start + 40) for start in (0, 40, 80)], ids=str)
async def test_writers_at_the_same_time_lose_no_rule(seeds):
    for seed in seeds:
        store, ends = await crowd(seed)
        rules = SharedRules(store, FINGERPRINT, lambda: NOW)
        found = await rules.read()
        for number, end in enumerate(ends):
            assert isinstance(end, asyncio.CancelledError) or (end and found.covers(rule(number)))
        # Whoever comes next makes one of what they left.
        store.hurry()
        await rules.publish(rule(99))
        assert len(store.objects) == 1
        assert (await rules.read()).covers(found.merge(rule(99)))


async def test_states_of_other_models_and_the_same_again_change_nothing():
    store = SlowStore()
    rules = SharedRules(store, FINGERPRINT, lambda: NOW)
    assert await rules.publish(rule(1)) is True
    assert await rules.publish(rule(1)) is False
    assert await SharedRules(store, b"another model's" * 3, lambda: NOW).read() == Retired()


async def test_places_that_writers_left_full_are_freed_by_who_knows_all(monkeypatch):
    store = SlowStore()
    rules = SharedRules(store, FINGERPRINT, lambda: NOW)
    with monkeypatch.context() as dying:
        dying.setattr(SlowStore, "delete", lambda self, key: asyncio.sleep(0, True))
        for number in range(PLACES):
            await rules.publish(rule(number))
    assert len(store.objects) == PLACES
    with pytest.raises(TierError):
        await rules.publish(rule(50))
    known = (await rules.read()).merge(rule(50))
    assert await rules.publish(known)
    assert len(store.objects) == 1
    assert (await rules.read()).covers(known)


@pytest.mark.parametrize("offset", [0, 9, 30, -1])
async def test_what_cannot_be_read_counts_as_if_all_was_retired(offset):
    store = SlowStore()
    rules = SharedRules(store, FINGERPRINT, lambda: NOW)
    await rules.publish(rule(1))
    ((name, data),) = store.objects.items()
    spoiled = bytearray(data)
    spoiled[offset] ^= 1
    store.objects[name] = bytes(spoiled)
    assert (await rules.read()).floor == NOW


FAR = 2**50


@pytest.mark.parametrize(
    "rotten",
    [
        b"",
        b"KVISTRET",
        packed(number=1, retired=Retired(epoch=FAR, floor=FAR)),
        packed(number=1, retired=Retired(epoch=FAR, rules={"tag:a": FAR})),
        packed(number=1, retired=Retired(epoch=1, rules={"tag:a": 2})),
        packed(number=1, retired=Retired(epoch=1, floor=2)),
        packed(number=2**64 - 1, retired=Retired(epoch=1)),
        packed(number=-1, retired=Retired(epoch=1)),
    ],
)
@pytest.mark.parametrize("known", [Retired(), rule(1)])
async def test_what_cannot_be_read_retires_once_and_is_replaced(rotten, known):
    clock = itertools.count(NOW)
    store = SlowStore()
    rules = SharedRules(store, FINGERPRINT, lambda: next(clock))
    await rules.publish(rule(3))
    (name,) = store.objects
    store.objects[name] = rotten
    found = await rules.read()
    assert NOW <= found.floor < FAR
    assert await rules.read() == found, "everything stored meanwhile is retired at each look"
    assert await rules.publish(known.merge(found))
    assert await rules.read() == known.merge(found)
    assert not rules.damaged


async def test_rules_of_a_clock_that_was_ahead_are_kept():
    """Of agents that know them, so they are no trick."""
    store = SlowStore()
    rules = SharedRules(store, FINGERPRINT, lambda: FAR + 1)
    known = Retired().with_rule("tag", "a", FAR)
    assert await rules.publish(known)
    assert await rules.read() == known


async def test_damaged_rules_empty_the_caches_once(begin):
    first, engine = await begin()
    await first.parts.controls.retire.retire({"tag": "other"})
    await stored(first, engine)
    lower = first.parts.lower[Tier.OBJECT]
    store = first.faulty.inner
    names = [item.key async for item in store.items() if b"KVISTRET" in await content_of(store, item)]
    await store.delete(names[0])
    await store.put_if_absent(names[0], [b"KVISTRET rotten"])
    await lower.publish()
    assert await in_store(first) == 0
    epoch = first.parts.core.authority.known.epoch
    await engine.store(CHAIN, epoch=epoch)
    await engine.lookup(CHAIN)
    await first.written()
    assert await in_store(first) == len(CHAIN)
    await lower.publish()
    assert first.parts.core.authority.known.epoch == epoch
    assert await in_store(first) == len(CHAIN)


@pytest.fixture
async def begin(tmp_path):
    """Starts agents without files of earlier ones, on one store."""
    running, backend = [], MemoryStore()

    async def start():
        agent = await AgentParts.over_bucket(tmp_path / f"agent{len(running)}", backend)
        running.append((agent, await FakeEngine.start(agent.socket)))
        await agent.parts.lower[Tier.OBJECT].publish()
        return running[-1]

    yield start
    for agent, engine in running:
        await engine.stop()
        agent.check()
        await agent.stop()


async def stored(agent, engine, tags=("a",)):
    await engine.store(CHAIN, tags=tags)
    await engine.lookup(CHAIN)
    await agent.written()


async def in_store(agent):
    """Chunks of the chain."""
    sizes = await agent.faulty.inner.sizes([FINGERPRINT[:16] + key for key in CHAIN])
    return sum(size is not None for size in sizes)


async def until(condition):
    async with asyncio.timeout(DEADLINE):
        while not await condition():
            pass  # each look is a question that waits for its answer


def undeletable(operation, key):
    return TierError("not now") if operation == "delete" and any(key[-16:-8]) else None


async def test_an_agent_without_files_serves_nothing_that_was_retired_before_it_came(begin):
    first, engine = await begin()
    await stored(first, engine)
    first.faulty.plan = undeletable
    answer = await first.parts.controls.retire.retire({"tag": "a"})
    assert (answer["complete"], answer["unpublished"]) == (True, [])
    assert await in_store(first) == 3
    new, engine = await begin()
    assert not (await engine.lookup(CHAIN)).refs
    assert new.parts.controls.retire.known.covers(first.parts.controls.retire.known)
    await engine.store(CHAIN, tags=("a",), epoch=new.parts.controls.retire.known.epoch)
    assert len((await engine.lookup(CHAIN)).refs) == 3


async def test_until_a_tier_has_said_what_is_retired_nothing_is_read_there(begin):
    first, engine = await begin()
    await stored(first, engine)
    second, engine = await begin()
    lower = second.parts.lower[Tier.OBJECT]
    second.faulty.plan = lambda operation, key: None if any(key[-16:-8]) else TierError("rules cannot be had")
    lower.serve(b"x" * 32)
    lower.serve(FINGERPRINT)
    assert not (await engine.lookup(CHAIN)).refs
    assert lower.closed
    second.faulty.plan = lambda operation, key: None
    assert await lower.publish()
    assert len((await engine.lookup(CHAIN)).refs) == 3


async def test_a_tier_that_could_not_be_told_is_named_and_told_when_it_is_back(begin):
    agent, _ = await begin()
    agent.faulty.plan = lambda operation, key: TierError("down")
    answer = await agent.parts.controls.retire.retire({"tag": "a"})
    assert (answer["complete"], answer["unpublished"]) == (False, ["object"])
    agent.faulty.plan = lambda operation, key: None
    rules = SharedRules(agent.faulty.inner, FINGERPRINT, lambda: NOW)

    async def told():
        return (await rules.read()).covers(agent.parts.controls.retire.known)

    await until(told)


async def test_rules_that_the_tier_lost_are_put_there_again(begin):
    agent, _ = await begin()
    await agent.parts.controls.retire.retire({"tag": "a"})
    store = agent.faulty.inner
    for item in [item async for item in store.items()]:
        await store.delete(item.key)
    assert await SharedRules(store, FINGERPRINT, lambda: NOW).read() == Retired()
    await agent.parts.lower[Tier.OBJECT].publish()
    assert (await SharedRules(store, FINGERPRINT, lambda: NOW).read()).rules


@pytest.mark.parametrize("selection", [{"tag": "a"}, {"keys": [CHAIN[1].hex()]}], ids=["tag", "prefix"])
async def test_copies_that_nobody_reads_are_swept_by_the_agent_that_told_the_tier(begin, selection):
    first, engine = await begin()
    await stored(first, engine)
    other, _ = await begin()
    left = 0 if "tag" in selection else 1
    await other.parts.controls.retire.retire(selection)

    counts = other.parts.lower[Tier.OBJECT].counts

    async def swept():
        return await in_store(other) == left and counts["swept"] >= 1

    await until(swept)


async def test_a_tier_without_room_for_a_rule_is_read_all_the_same(begin):
    agent, engine = await begin()
    await stored(agent, engine)
    agent.faulty.plan = lambda operation, key: StorageFull("full") if operation == "put" else None
    answer = await agent.parts.controls.retire.retire({"tag": "b"})
    assert (answer["complete"], answer["unpublished"]) == (False, ["object"])
    await agent.clear_memory()
    assert len((await engine.lookup(CHAIN)).refs) == 3
