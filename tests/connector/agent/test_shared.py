"""A shared tier in the agent: found by asking, never in the way, and nothing wrong is ever served.

The agent's parts run in this process over an object store in memory that fails or stalls when
told to; `test_shared_processes.py` has real agents and real servers.
"""

import asyncio

import pytest
from obstore.store import MemoryStore

from kvist_connector.agent import shared as shared_module
from kvist_connector.errors import StorageFull, TierError
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.feed import FeedMessage, Load
from kvist_connector.protocol.framing import FrameDecoder
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_parts import DEADLINE, AgentParts, answer, ask
from kvist_connector.testing.agent_parts import keys_of as keys
from kvist_connector.testing.fake_engine import FakeEngine, layout, prompt_keys
from kvist_connector.tiers.base import Capabilities
from kvist_connector.tiers.envelope import EnvelopeStore
from kvist_connector.tiers.object_store import ObjectStore

FINGERPRINT = b"f" * 32


class Harness(AgentParts):
    """An agent over a shared tier."""

    @property
    def tier(self):
        return self.parts.lower[Tier.OBJECT]

    def calls(self, operation):
        """Keys of chunks: what is retired has places that are small numbers."""
        names = [key[-16:] for called, key in self.faulty.calls if called == operation]
        return [name for name in names if any(name[:8])]

    def check(self):
        super().check()
        assert self.parts.loader.pending == 0


@pytest.fixture
async def cluster(tmp_path):
    """Starts agents that share one store; keyword arguments are settings."""
    running, backend = [], MemoryStore()

    async def begin(**settings):
        folder = tmp_path / f"agent{len(running)}"
        running.append(await Harness.over_bucket(folder, backend, **settings))
        return running[-1]

    yield begin
    for harness in running:
        await harness.stop()


async def stocked(cluster, chunks=6, **settings):
    """One agent has stored a chain; another one, with an engine, knows nothing yet."""
    first = await cluster()
    engine = await FakeEngine.start(first.socket)
    await engine.store(keys(chunks), root=b"r" * 16)
    await engine.lookup(keys(chunks))
    await first.written()
    await engine.stop()
    second = await cluster(**settings)
    engine = await FakeEngine.start(second.socket)
    await second.tier.publish()  # the first look at what is retired is over
    return first, second, engine


async def test_what_one_agent_stored_another_loads(cluster):
    _, second, engine = await stocked(cluster)
    found = await engine.lookup(keys(8))
    assert found.tiers == bytes([Tier.OBJECT] * 6)
    assert engine.holds(keys(6), found)
    assert found.known == 6
    chunk = second.parts.catalog.get(keys(1)[0])
    assert (chunk.parent, chunk.index) == (b"r" * 16, 0)
    again = await engine.lookup(keys(8))
    assert again.tiers == bytes([Tier.MEMORY] * 6)
    second.check()
    await engine.stop()


async def test_what_only_a_shared_tier_has_is_not_pinned(cluster):
    _, second, engine = await stocked(cluster)
    edits, asked = second.parts.controls.edits, {"keys": [key.hex() for key in keys(6)]}
    told = [await edits.pin({**asked, "dry_run": dry_run}) for dry_run in (True, False)]
    assert [(answer["chunks"], answer["missing"]) for answer in told] == [(0, 6)] * 2
    assert second.parts.controls.stats()["pinned"] == 0
    await edits.prefetch(asked)
    answer = await edits.pin(asked)
    assert (answer["chunks"], answer["missing"]) == (6, 0)
    await engine.stop()


async def test_a_chunk_is_sent_once_for_the_cluster(cluster):
    _, second, engine = await stocked(cluster)
    await engine.store(keys(6))
    await engine.lookup(keys(6))
    await second.written()
    assert second.parts.writebehind.counts["present"] == 6
    assert second.parts.writebehind.counts["written"] == 0
    # And what was loaded is not written back.
    await second.clear_memory()
    second.faulty.calls.clear()
    assert len((await engine.lookup(keys(6))).refs) == 6
    await second.written()
    assert not second.calls("put")
    second.check()
    await engine.stop()


async def test_a_lookup_stops_at_the_first_missing_parent(cluster):
    _, second, engine = await stocked(cluster, chunks=20)
    await second.faulty.delete(FINGERPRINT[:16] + keys(20)[12])
    found = await engine.lookup(keys(20))
    assert len(found.refs) == 12
    assert found.known == 12
    second.check()
    await engine.stop()


async def test_an_unknown_prompt_costs_one_short_question(cluster):
    _, second, engine = await stocked(cluster)
    second.faulty.calls.clear()
    assert not (await engine.lookup(keys(60, first=5000))).refs
    assert len(second.calls("ask")) == 8
    await engine.stop()


async def test_what_the_engine_has_itself_is_not_asked_for(cluster):
    _, second, engine = await stocked(cluster)
    second.faulty.calls.clear()
    ask(engine, keys(6), local_tokens=48)
    assert not (await answer(engine)).refs
    assert not second.calls("ask")
    await engine.stop()


async def test_a_chunk_in_memory_is_answered_at_once_and_the_rest_follows(cluster):
    _, second, engine = await stocked(cluster)
    await engine.store(keys(2))
    await engine.lookup(keys(2))
    second.faulty.gate.clear()
    ask(engine, keys(6))
    first = await answer(engine, pending=True)
    assert (len(first.refs), first.known) == (2, 2)
    second.faulty.gate.set()
    found = await answer(engine)
    assert found.tiers == bytes([Tier.MEMORY] * 2 + [Tier.OBJECT] * 4)
    assert engine.holds(keys(6), found)
    second.check()
    await engine.stop()


async def test_no_answer_within_the_deadline_is_a_miss(cluster):
    _, second, engine = await stocked(cluster, lookup_deadline=0.05)
    await engine.store(keys(2))
    await second.written()
    second.faulty.gate.clear()
    ask(engine, keys(6))
    found = await answer(engine)
    assert (len(found.refs), found.known) == (2, 2)
    assert second.parts.loader.counts["lookups_asked_late"] == 1
    second.faulty.gate.set()
    second.check()
    await engine.stop()


async def told(parts):
    """Speeds by tier, as a reader of the feed is told."""
    reader = parts.feed.open("reader")
    (load,) = [m for m in FrameDecoder(FeedMessage).feed(await reader.take()) if isinstance(m, Load)]
    parts.feed.leave("reader", reader)
    return {speed.tier: speed.bytes_per_second for speed in load.speeds}


async def test_what_follows_retired_chunks_of_others_is_not_served(cluster):
    _, second, engine = await stocked(cluster)
    await second.parts.controls.retire.retire({"keys": [keys(6)[1].hex()]})
    epoch = second.parts.controls.retire.known.epoch
    # The chunks between are refused one by one, and the engine computes them and all that follow anew.
    for _ in range(3):
        hits = len((await engine.lookup(keys(6))).refs)
        await engine.store(keys(6), start=hits, root=b"r" * 16, epoch=epoch)
    assert len((await engine.lookup(keys(6))).refs) == 6
    assert [second.parts.catalog.get(key).epoch for key in keys(6)] == [0] + [epoch] * 5
    second.check()
    await engine.stop()


async def answers(agent):
    """The agent knows that its store is back."""
    async with asyncio.timeout(DEADLINE):
        while agent.tier.asking:
            await agent.tier.asked()


async def test_a_failing_store_is_a_miss_and_its_return_is_noticed(cluster):
    _, second, engine = await stocked(cluster)
    second.faulty.plan = lambda operation, key: TierError("down")
    for number in range(3):
        found = await engine.lookup(keys(6 - number))
        assert (found.refs, found.known) == ((), 0)
    assert second.tier.counts["ask_failed"] == 3
    assert second.parts.controls.stats()["tiers"]["object"]["problem"] == "down"
    assert (await told(second.parts))[Tier.OBJECT] == 0
    # The engine computes it, and it is kept here.
    await engine.store(keys(6))
    assert (await engine.lookup(keys(6))).tiers == bytes([Tier.MEMORY] * 6)
    assert not await second.parts.writebehind.flush(DEADLINE)
    second.faulty.plan = lambda operation, key: None
    await answers(second)
    await second.written()
    await second.parts.controls.edits.clear({"tier": "memory"})
    assert engine.holds(keys(6), await engine.lookup(keys(6)))
    assert second.parts.controls.stats()["tiers"]["object"]["problem"] == ""
    assert (await told(second.parts))[Tier.OBJECT] > 0
    second.check()
    await engine.stop()


async def test_a_chunk_that_cannot_be_read_is_worth_storing_again(cluster):
    _, second, engine = await stocked(cluster)
    broken = keys(6)[3]
    second.faulty.plan = lambda operation, key: (
        TierError("broken") if operation == "get" and key[-16:] == broken else None
    )
    found = await engine.lookup(keys(6))
    assert len(found.refs) == 3
    assert found.known == 3
    assert broken in (await engine.scheduler.expect(wire.Evicted)).keys
    second.check()
    await engine.stop()


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "garbage"])
async def test_what_is_not_the_chunk_is_counted_deleted_and_never_served(cluster, damage):
    _, second, engine = await stocked(cluster)
    victim = FINGERPRINT[:16] + keys(6)[2]
    size = (await second.faulty.sizes([victim]))[0]
    buffer = bytearray(size)
    await second.faulty.get(shared_read(victim, buffer))
    await second.faulty.delete(victim)
    if damage == "foreign":
        other = EnvelopeStore(_Raw(second.faulty), second.parts.lower[Tier.OBJECT]._store._threads)
        await other.put_if_absent(
            [buffer[4096:]], fingerprint=b"other model" * 3, key=keys(6)[2], parent=keys(6)[1], index=2
        )
    else:
        changed = {"cut": buffer[:-1], "flipped": buffer[:-1] + b"?", "garbage": bytes(size)}[damage]
        await second.faulty.put_if_absent(victim, [changed])
    found = await engine.lookup(keys(6))
    assert len(found.refs) == 2
    assert engine.holds(keys(2), found)
    await second.tier.settled()
    assert second.tier.counts["foreign"] + second.tier.counts["corrupt"] == 1
    assert second.tier.counts["foreign"] == (damage == "foreign")
    assert await second.faulty.sizes([victim]) == [None]
    # The next one that computes it puts it right.
    await engine.store(keys(6), start=2)
    await engine.lookup(keys(6))
    await second.written()
    assert await second.faulty.sizes([victim]) == [size]
    second.check()
    await engine.stop()


def shared_read(name, buffer):
    from kvist_connector.tiers.base import Read

    return Read(name, [memoryview(buffer)])


class _Raw:
    """Writes under our scope whatever fingerprint the envelope names."""

    def __init__(self, inner):
        self.inner = inner
        self.capabilities = Capabilities(persistent=True, shared=False, listable=True)

    async def put_if_absent(self, key, parts):
        return await self.inner.put_if_absent(FINGERPRINT[:16] + key, parts)


async def test_models_do_not_see_each_other(cluster):
    _, second, engine = await stocked(cluster)
    await engine.stop()
    other = await FakeEngine.start(second.socket, layout(b"g" * 32))
    assert not (await other.lookup(keys(6))).refs
    await other.store(prompt_keys(range(48), b"g" * 32))
    await other.lookup(prompt_keys(range(48), b"g" * 32))
    await second.written()
    removed = await second.parts.controls.edits.clear({"tier": "object"})
    assert (removed["chunks"], removed["bytes"], removed["leased"]) == (6, 6 * (16384 + 4096), 0)
    # The first model's chunks are still there.
    assert all(await second.faulty.sizes([FINGERPRINT[:16] + key for key in keys(6)]))
    second.check()
    await other.stop()


async def test_clearing_is_for_the_whole_cluster(cluster):
    first, second, engine = await stocked(cluster)
    assert (await engine.lookup(keys(6))).tiers == bytes([Tier.OBJECT] * 6)
    assert (await first.parts.controls.edits.clear({"tier": "object"}))["chunks"] == 6
    await second.clear_memory()
    found = await engine.lookup(keys(6))
    assert (found.refs, found.known) == ((), 0)
    second.check()
    await engine.stop()


async def test_a_store_that_cannot_be_cleared_serves_nothing_until_it_was(cluster, monkeypatch):
    monkeypatch.setattr(shared_module, "_RETRY", 0.0)
    _, second, engine = await stocked(cluster)
    second.faulty.plan = lambda operation, key: TierError("down") if operation == "delete" else None
    with pytest.raises(TierError, match="down"):
        await second.parts.controls.edits.clear({"tier": "object"})
    assert second.tier.closed
    assert not (await engine.lookup(keys(6))).refs
    second.faulty.plan = lambda operation, key: None
    async with asyncio.timeout(DEADLINE):
        await second.tier.settled()
    assert await second.faulty.sizes([FINGERPRINT[:16] + key for key in keys(6)]) == [None] * 6
    await engine.store(keys(2))
    await engine.lookup(keys(2))
    await second.written()
    assert await second.faulty.sizes([FINGERPRINT[:16] + keys(1)[0]]) != [None]
    second.check()
    await engine.stop()


async def test_what_was_asked_for_before_a_clear_does_not_count_after_it(cluster):
    _, second, engine = await stocked(cluster)
    second.faulty.gate.clear()
    ask(engine, keys(6))
    await answer(engine, pending=True)
    second.tier.drop_all()
    second.faulty.gate.set()
    found = await answer(engine)
    assert (found.refs, found.known) == ((), 0)
    await second.tier.settled()
    assert not second.parts.catalog.keys(Tier.OBJECT)
    second.check()
    await engine.stop()


async def test_what_was_read_before_a_clear_is_not_served_after_it(cluster, monkeypatch):
    _, second, engine = await stocked(cluster)
    read, go_on, inner = asyncio.Event(), asyncio.Event(), second.faulty.get

    async def slow(what):
        length = await inner(what)
        read.set()
        await go_on.wait()
        return length

    monkeypatch.setattr(second.faulty, "get", slow)
    ask(engine, keys(6))
    async with asyncio.timeout(DEADLINE):
        await read.wait()
    second.tier.drop_all()
    go_on.set()
    found = await answer(engine)
    assert (found.refs, found.known) == ((), 0)
    await second.tier.settled()
    second.check()
    await engine.stop()


async def test_what_is_not_worth_loading_may_be_stored_here(cluster):
    _, second, engine = await stocked(cluster)
    engine.scheduler.send(wire.Step(load=wire.EngineLoad(prefill_seconds_per_token=1e-12)))
    ask(engine, keys(6))
    found = await answer(engine)
    assert (found.refs, found.known) == ((), 0)
    assert not second.calls("get")
    second.check()
    await engine.stop()


async def test_a_reset_of_the_engine_clears_it_too(cluster):
    _, second, engine = await stocked(cluster)
    engine.scheduler.send(wire.Reset())
    assert not (await engine.lookup(keys(6))).refs
    async with asyncio.timeout(DEADLINE):
        await second.tier.settled()
    assert await second.faulty.sizes([FINGERPRINT[:16] + key for key in keys(6)]) == [None] * 6
    await engine.stop()


async def test_what_the_store_lost_is_written_again_before_what_continues_it(cluster):
    agent = await cluster()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(6))
    await engine.lookup(keys(6))
    await agent.written()
    # As a server without persistence that was started again.
    for key in keys(6):
        await agent.faulty.delete(FINGERPRINT[:16] + key)
    await engine.store(keys(20, first=5000))
    await engine.lookup(keys(20, first=5000))
    await engine.store(keys(7), start=6)
    await engine.lookup(keys(7))
    await agent.written()
    assert all(await agent.faulty.sizes([FINGERPRINT[:16] + key for key in keys(7)]))
    agent.check()
    await engine.stop()


async def test_nothing_is_written_that_no_lookup_could_reach(cluster):
    _, second, engine = await stocked(cluster)
    await engine.lookup(keys(6))
    await second.faulty.delete(FINGERPRINT[:16] + keys(6)[5])
    second.parts.memory.settle_fresh()
    second.parts.memory.drop(second.parts.catalog.resident(keys(6)[5]))
    await engine.store(keys(7), start=6)
    await second.written()
    assert await second.faulty.sizes([FINGERPRINT[:16] + keys(7)[6]]) == [None]
    await engine.stop()


async def test_a_full_store_refuses_and_nothing_else_happens(cluster):
    agent = await cluster()
    engine = await FakeEngine.start(agent.socket)
    agent.faulty.plan = lambda operation, key: StorageFull("full") if operation == "put" else None
    await engine.store(keys(2))
    await engine.lookup(keys(2))
    await agent.written()
    assert agent.tier.counts["write_refused"] >= 1
    assert len((await engine.lookup(keys(2))).refs) == 2
    agent.check()
    await engine.stop()


async def test_what_the_agent_believes_of_it_is_bounded(cluster, monkeypatch):
    monkeypatch.setattr(shared_module, "MAX_KNOWN", 4)
    _, second, engine = await stocked(cluster, chunks=12)
    found = await engine.lookup(keys(12))
    assert engine.holds(keys(12), found)
    assert len(second.parts.catalog.index(Tier.OBJECT)) <= 4
    second.check()
    await engine.stop()


async def test_a_released_request_is_forgotten_while_it_asks(cluster):
    _, second, engine = await stocked(cluster)
    second.faulty.gate.clear()
    ask(engine, keys(6))
    await answer(engine, pending=True)
    engine.scheduler.send(wire.Step(releases=("r",)))
    ask(engine, keys(6), "next")
    await answer(engine, "next", pending=True)
    second.faulty.gate.set()
    assert len((await answer(engine, "next")).refs) == 6
    assert not engine.scheduler.received(wire.Answer)
    second.check()
    await engine.stop()


async def test_requests_that_ask_hold_up_no_other(cluster):
    _, second, engine = await stocked(cluster)
    await engine.store(keys(4, first=1000))
    second.faulty.gate.clear()
    ask(engine, keys(6), "slow")
    await answer(engine, "slow", pending=True)
    ask(engine, keys(4, first=1000), "quick")
    assert len((await answer(engine, "quick")).refs) == 4
    second.faulty.gate.set()
    assert len((await answer(engine, "slow")).refs) == 6
    second.check()
    await engine.stop()


async def test_a_chunk_larger_than_the_store_takes_is_refused_at_start_with_both_sizes(cluster, monkeypatch):
    small = Capabilities(persistent=True, shared=True, listable=True, largest=4096 + 10_000)
    monkeypatch.setattr(ObjectStore, "capabilities", property(lambda self: small))
    agent = await cluster()
    with pytest.raises(PermissionError, match=r"16384 bytes, and the object tier takes at most 10000"):
        await FakeEngine.start(agent.socket)


@pytest.mark.parametrize("lost", ["ask", "put"])
async def test_what_could_not_be_written_while_the_store_was_lost_is_written_when_it_is_back(cluster, lost):
    agent = await cluster()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(2))
    await engine.lookup(keys(2))
    await engine.store(keys(1, first=5000))
    await agent.written()
    agent.faulty.plan = lambda operation, key: TierError("down") if operation in (lost, "ask") else None
    await engine.store(keys(4), start=2)
    await engine.lookup(keys(4))
    assert not await agent.parts.writebehind.flush(DEADLINE)
    assert agent.parts.writebehind.pending_chunks == 2
    behind = [FINGERPRINT[:16] + key for key in keys(4)[2:]]
    assert await agent.faulty.inner.sizes(behind) == [None, None]
    agent.faulty.plan = lambda operation, key: None
    await answers(agent)
    await agent.written()
    assert None not in await agent.faulty.inner.sizes(behind)
    agent.check()
    await engine.stop()


async def test_what_waits_for_a_lost_store_outlives_its_clearing(cluster):
    agent = await cluster()
    engine = await FakeEngine.start(agent.socket)
    agent.faulty.plan = lambda operation, key: TierError("down")
    await engine.store(keys(3))
    await engine.lookup(keys(3))
    assert not await agent.parts.writebehind.flush(DEADLINE)
    agent.tier.drop_all()
    agent.faulty.plan = lambda operation, key: None
    await answers(agent)
    await agent.tier.settled()
    await agent.written()
    assert None not in await agent.faulty.inner.sizes([FINGERPRINT[:16] + key for key in keys(3)])
    agent.check()
    await engine.stop()


async def test_a_chunk_that_fails_though_the_store_answers_does_not_hold_up_the_others(cluster):
    agent = await cluster()
    engine = await FakeEngine.start(agent.socket)
    bad, good = keys(1)[0], keys(1, first=5000)[0]
    agent.faulty.plan = lambda operation, key: (
        TierError("no") if operation == "put" and key[-16:] == bad else None
    )
    await engine.store([bad])
    await engine.store([good])
    await engine.lookup([good])
    await agent.written()
    found = await agent.faulty.inner.sizes([FINGERPRINT[:16] + key for key in (bad, good)])
    assert found[0] is None
    assert found[1] is not None
    assert agent.parts.writebehind.counts["refused"] == 2
    agent.check()
    await engine.stop()


async def test_a_clearing_that_dies_is_told_and_the_next_one_works(cluster):
    agent = await cluster()
    engine = await FakeEngine.start(agent.socket)
    await engine.store(keys(2))
    await engine.lookup(keys(2))
    await agent.written()
    agent.faulty.plan = lambda operation, key: ValueError("nonsense") if operation == "delete" else None
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(TierError, match="the clearing was given up"):
            await agent.tier.clear()
    agent.faulty.plan = lambda operation, key: None
    assert (await agent.tier.clear())[0] == 2
    agent.check()
    await engine.stop()
