"""Placement exclusive: a chunk is in memory or on disk; a move copies before it deletes and loses nothing."""

import asyncio
import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_connector.agent.exclusive import kept_empty
from kvist_connector.agent.lower import Stored
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.errors import ConfigError, TierError
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.settings import validate
from kvist_connector.testing.agent_parts import DEADLINE, AgentParts, answer, ask, keys_of
from kvist_connector.testing.fake_engine import FakeEngine
from kvist_connector.testing.whole_agent import WholeAgent

CHUNK = 4 * 4096
MEMORY = 24 * (CHUNK + 64) + 3 * 4096
SLOTS = 24


class Harness:
    """Agents with placement exclusive over one folder, one after another, each with an engine."""

    def __init__(self, folder):
        self._folder = folder
        self._number = itertools.count()
        self.agent = None
        self.engine = None

    async def start(self, **more):
        given = {"memory": MEMORY, "placement": "exclusive"} | more
        socket = self._folder / f"s{next(self._number)}"
        self.agent = await AgentParts.over_disk(self._folder, 64 << 20, socket=socket, **given)
        self.faulty = self.agent.faulty
        self.parts = self.agent.parts
        self.engine = await FakeEngine.start(self.agent.socket)
        return self

    async def stop(self):
        if self.agent is not None:
            await self.engine.stop()
            await self.agent.stop()
            self.agent = None

    @property
    def disk(self):
        return self.parts.lower[Tier.DISK]

    @property
    def counts(self):
        return self.parts.writebehind.counts

    def places(self, keys):
        return [self.parts.catalog.tiers_of(key) for key in keys]

    def files(self):
        return {bytes.fromhex(path.stem) for path in (self._folder / "disk").glob("*/*.kvist")}

    async def settled(self):
        """No move is under way, and none is due."""
        assert self.parts.memory.slots is not None
        await self.parts.exclusive.make_room(kept_empty(self.parts.memory.slots.size))
        await self.disk.settled()

    async def stored(self, keys, start=0):
        """A few at a time, as slowly as the disk takes them."""
        for end in range(start, len(keys), 2):
            await self.engine.store(keys[: end + 2], end)
            await self.engine.lookup(keys[:1])  # an answer: the store has been taken
            await self.settled()

    async def on_disk(self, keys):
        """Only there, as after memory was lost."""
        await self.stored(keys)
        assert await self.parts.writebehind.flush(DEADLINE)
        await self.parts.controls.edits.clear({"tier": "memory"})
        assert self.places(keys) == [[Tier.DISK]] * len(keys)

    async def loaded(self, keys):
        """Whether a request gets all of it, bit for bit."""
        found = await self.engine.lookup(keys, release=False)
        whole = len(found.refs) == len(keys) and self.engine.holds(keys, found)
        self.engine.scheduler.send(wire.Step(releases=("r",)))
        await self.engine.lookup(())
        return whole

    def check(self):
        self.agent.check()
        self.parts.catalog.check_integrity()


@pytest.fixture
async def harness(tmp_path):
    made = Harness(tmp_path)
    await made.start()
    yield made
    await made.stop()


async def test_a_chunk_that_is_loaded_leaves_the_disk(harness):
    keys = keys_of(4)
    await harness.on_disk(keys)
    assert await harness.loaded(keys)
    await harness.settled()
    assert harness.places(keys) == [[Tier.MEMORY]] * 4
    assert not harness.files()
    assert harness.counts["promoted"] == 4
    assert await harness.loaded(keys)
    harness.check()


async def test_what_memory_has_no_room_for_goes_to_the_disk_and_its_bytes_are_counted(harness):
    chains = [keys_of(4, first) for first in range(0, 1000, 100)]
    for chain in chains:
        await harness.stored(chain)
    places = [place for chain in chains for place in harness.places(chain)]
    assert all(len(place) == 1 for place in places)
    demoted = places.count([Tier.DISK])
    assert demoted == harness.counts["demoted"] == len(harness.files()) > 0
    assert harness.counts["bytes_stored_disk"] == demoted * CHUNK
    assert harness.counts["dropped_undemoted"] == 0
    for chain in chains:
        assert await harness.loaded(chain)
        await harness.settled()
    harness.check()


async def test_loads_demote_before_they_take_room(harness):
    """Six chains of four do not fit: each one that comes back sends another one down."""
    chains = [keys_of(4, first) for first in range(0, 600, 100)]
    for chain in chains:
        await harness.stored(chain)
    for chain in chains * 2:
        assert await harness.loaded(chain)
        assert all(harness.places(chain))
    await harness.settled()
    assert all(len(place) == 1 for chain in chains for place in harness.places(chain))
    assert harness.counts["dropped_undemoted"] == 0
    harness.check()


async def test_a_chunk_is_in_memory_until_it_is_on_the_disk_and_stays_if_it_is_used_meanwhile(harness):
    keys = keys_of(2)
    await harness.engine.store(keys)
    await harness.engine.lookup(keys[:1])
    harness.parts.memory.settle_fresh()
    harness.faulty.gate.clear()
    moving = asyncio.create_task(harness.parts.exclusive.make_room(SLOTS))
    async with asyncio.timeout(DEADLINE):
        while ("put", keys[1]) not in harness.faulty.calls:
            await harness.engine.lookup(())
    ask(harness.engine, keys)
    found = await answer(harness.engine)
    assert found.tiers == bytes([Tier.MEMORY] * 2)
    assert harness.engine.holds(keys, found)
    harness.faulty.gate.set()
    await moving
    await harness.disk.settled()
    assert harness.places(keys) == [[Tier.MEMORY]] * 2
    assert harness.counts["demotions_undone"] == 1
    assert not harness.files()
    harness.engine.scheduler.send(wire.Step(releases=("r",)))
    await harness.engine.lookup(())
    harness.check()


async def test_a_tag_that_comes_while_a_chunk_is_written_keeps_it_in_memory(harness):
    """Its file would not have the tag, and retirement by it would not find the chunk after a restart."""
    keys = keys_of(1)
    await harness.engine.store(keys)
    await harness.engine.lookup(keys)
    await harness.engine.lookup(())  # the lease has ended
    harness.parts.memory.settle_fresh()
    harness.faulty.gate.clear()
    moving = asyncio.create_task(harness.parts.exclusive.make_room(SLOTS))
    async with asyncio.timeout(DEADLINE):
        while ("put", keys[0]) not in harness.faulty.calls:
            await harness.engine.lookup(())
    harness.parts.memory.tag(harness.parts.catalog.get(keys[0]), ("late",))
    harness.faulty.gate.set()
    await moving
    await harness.disk.settled()
    places = harness.places(keys)
    assert places in ([[Tier.MEMORY]], [[Tier.DISK]])
    if places == [[Tier.DISK]]:  # it was written again, with its tag
        header = await harness.disk.header(harness.parts.catalog.get(keys[0]))
        assert header.tags == ("late",)
    harness.check()


async def test_a_disk_that_takes_nothing_costs_the_least_valuable_and_nobody_waits(harness, caplog):
    harness.faulty.plan = lambda operation, key: TierError("it fails") if operation == "put" else None
    chains = [keys_of(4, first) for first in range(0, 1000, 100)]
    for chain in chains:
        await harness.engine.store(chain)
    assert await harness.loaded(chains[-1])
    await harness.settled()
    assert harness.counts["demotions_refused"] > 0
    assert harness.counts["dropped_undemoted"] > 1
    assert caplog.text.count("the least valuable are dropped") == 1
    harness.check()


async def test_a_kill_between_copy_and_deletion_leaves_two_copies_and_the_next_move_ends_that(tmp_path):
    harness = await Harness(tmp_path).start()
    keys = keys_of(4)
    await harness.on_disk(keys)
    harness.faulty.plan = lambda operation, key: TierError("killed") if operation == "delete" else None
    assert await harness.loaded(keys)
    await harness.disk.settled()
    assert harness.files() == set(keys)
    await harness.stop()
    await harness.start()
    try:
        assert await harness.loaded(keys)
        assert all(Tier.MEMORY in place for place in harness.places(keys))
        harness.parts.memory.settle_fresh()
        harness.faulty.calls.clear()
        await harness.parts.exclusive.make_room(SLOTS)
        both = [key for key in keys if ("put", key) not in harness.faulty.calls]
        assert all(place == [Tier.DISK] for place in harness.places(both))
        assert await harness.loaded(keys)
        harness.check()
    finally:
        await harness.stop()


async def test_pinned_chunks_keep_their_places(harness):
    keys = keys_of(4)
    await harness.on_disk(keys)
    harness.parts.pins.pin([harness.parts.catalog.get(keys[0])], 3600)
    assert await harness.loaded(keys)
    await harness.settled()
    assert harness.places(keys) == [[Tier.MEMORY, Tier.DISK], *[[Tier.MEMORY]] * 3]
    harness.parts.memory.settle_fresh()
    await harness.parts.exclusive.make_room(SLOTS)
    assert harness.places(keys) == [[Tier.MEMORY, Tier.DISK], *[[Tier.DISK]] * 3]
    harness.check()


async def test_copies_and_recoding_take_nothing_off_the_disk(harness):
    keys = keys_of(4)
    await harness.on_disk(keys)
    edits = harness.parts.controls.edits
    assert (await edits.compress({"tier": "disk", "all": True}))["chunks"] == 4
    assert all(Tier.DISK in place for place in harness.places(keys))
    await edits.clear({"tier": "memory"})
    await edits.move({"to": "memory", "copy": True, "all": True})
    assert harness.places(keys) == [[Tier.MEMORY, Tier.DISK]] * 4
    await edits.clear({"tier": "memory"})
    await edits.prefetch({"all": True})
    assert harness.places(keys) == [[Tier.MEMORY]] * 4
    harness.check()


async def test_what_was_dropped_is_seen_in_figures_and_statistics(tmp_path, monkeypatch):
    whole = await WholeAgent.start(
        tmp_path, memory=MEMORY, placement="exclusive", disk={"path": tmp_path / "disk"}
    )
    try:

        async def refuse(chunk, parts):
            return Stored.REFUSED

        monkeypatch.setattr(whole.parts.lower[Tier.DISK], "store", refuse)
        assert await whole.metric("kvist_agent_events_total", reason="dropped_undemoted") is None
        for first in range(0, 1000, 100):
            await whole.computed(keys_of(4, first))
        dropped = await whole.metric("kvist_agent_events_total", reason="dropped_undemoted")
        assert dropped > 0
        assert (await whole.stats())["counters"]["dropped_undemoted"] == dropped
        await whole.check()
    finally:
        await whole.stop()


async def test_shared_tiers_keep_what_one_agent_loads(tmp_path):
    whole = await WholeAgent.start(
        tmp_path,
        placement="exclusive",
        disk={"path": tmp_path / "disk"},
        object_store={"url": (tmp_path / "bucket").as_uri()},
    )
    try:
        keys = keys_of(3)
        await whole.computed(keys)
        await whole.written()
        for tier in ("memory", "disk"):
            await whole.post("clear", {"tier": tier})
        assert await whole.found(keys, memory=True) == [Tier.OBJECT] * 3
        found = (await whole.post("lookup", {"keys": [key.hex() for key in keys]}))["chunks"]
        assert [chunk["tiers"] for chunk in found] == [["memory", "object"]] * 3
        await whole.check()
    finally:
        await whole.stop()


@pytest.mark.parametrize("missing", [{"disk": {}}, {"memory": 0}])
def test_it_needs_memory_and_a_disk(tmp_path, missing):
    given = {"replica": "r", "socket": "/s", "arena": "/a", "disk": {"path": "/d"}, "placement": "exclusive"}
    with pytest.raises(ConfigError, match="placement: exclusive is for memory and a disk"):
        validate(AgentSettings, given | missing)


CHAINS = [keys_of(3, 100 * number) for number in range(12)]
chain = st.integers(0, len(CHAINS) - 1)
steps = st.one_of(
    st.tuples(st.just("store"), chain),
    st.tuples(st.just("load"), chain),
    st.tuples(st.just("pin"), chain),
    st.tuples(st.just("unpin"), chain),
    st.tuples(st.just("flush"), chain),
    st.tuples(st.just("restart"), chain),
    st.tuples(st.just("no deletions"), chain),
)


@given(st.lists(steps, min_size=4, max_size=14))
@settings(max_examples=12)
def test_no_chunk_is_ever_lost_by_moves(tmp_path_factory, script):
    """36 chunks in an arena of 24 slots and a disk: whatever happens, each is somewhere, and whole."""

    async def play():
        harness = await Harness(tmp_path_factory.mktemp("moves")).start()
        stored = set()
        try:
            for step, number in script:
                keys = CHAINS[number]
                match step:
                    case "store" if number not in stored:
                        await harness.stored(keys)
                        stored.add(number)
                    case "load" if number in stored:
                        assert await harness.loaded(keys)
                    case "pin" if number in stored:
                        harness.parts.pins.pin(map(harness.parts.catalog.get, keys), 3600)
                    case "unpin":
                        harness.parts.pins.unpin(keys)
                    case "flush":
                        await harness.parts.writebehind.flush(DEADLINE)
                    case "restart":
                        await harness.stop()
                        await harness.start()
                    case "no deletions":
                        harness.faulty.plan = lambda operation, key: (
                            TierError("killed") if operation == "delete" else None
                        )
                await harness.settled()
                for each in stored:
                    assert all(harness.places(CHAINS[each])), (step, number)
            for each in stored:
                with contextlib.suppress(TimeoutError):
                    assert await harness.loaded(CHAINS[each])
            harness.check()
        finally:
            await harness.stop()

    asyncio.run(play())
