"""Bringing chunks in from disk: deadlines, faults, order, and what a request may not hold up.

The agent's parts run in this process behind a real socket, over a store that fails or stalls
when told to.
"""

import asyncio

import pytest

from kvist_connector.agent.metrics import Metrics
from kvist_connector.agent.speed import Speed
from kvist_connector.errors import StorageFull, TierError
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_parts import DEADLINE, AgentParts, answer, ask
from kvist_connector.testing.agent_parts import keys_of as keys
from kvist_connector.testing.fake_engine import FakeEngine
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.faulty import FaultyStore


class Harness(AgentParts):
    """An agent over a disk tier."""

    def reads(self):
        return [key for operation, key in self.faulty.calls if operation == "get"]


@pytest.fixture
async def agent(tmp_path):
    """Starts one; keyword arguments are settings."""
    cleanup = []

    async def begin(queue=1 << 30, **more):
        harness = await Harness.over_disk(tmp_path, limits={"write_behind_bytes": queue}, **more)
        cleanup.append(harness)
        return harness

    yield begin
    for harness in cleanup:
        await harness.stop()


async def stocked(agent, chunks=6, **settings):
    """An agent and an engine whose chunks are on disk only."""
    harness = await agent(**settings)
    engine = await FakeEngine.start(harness.socket)
    await put_on_disk(harness, engine, keys(chunks))
    harness.faulty.calls.clear()
    return harness, engine


async def put_on_disk(harness, engine, prompt):
    """Store a prompt's chunks; nothing is left in memory."""
    await engine.store(prompt)
    await engine.lookup(prompt)
    await harness.clear_memory()


async def test_pending_first_then_the_whole_hit(agent):
    harness, engine = await stocked(agent)
    ask(engine, keys(6))
    first = await answer(engine, pending=True)
    assert (first.refs, first.known) == ((), 6)
    last = await answer(engine)
    assert last.tiers == bytes([Tier.DISK] * 6)
    assert engine.holds(keys(6), last)
    harness.check()
    await engine.stop()


async def test_equal_requests_read_each_chunk_once(agent):
    harness, engine = await stocked(agent)
    harness.faulty.gate.clear()
    for request in ("a", "b", "c"):
        ask(engine, keys(6), request)
        await answer(engine, request, pending=True)
    harness.faulty.gate.set()
    for request in ("a", "b", "c"):
        assert len((await answer(engine, request)).refs) == 6
    assert sorted(harness.reads()) == sorted(keys(6))
    assert sum(session.leases.chunks for session in harness.parts.core.schedulers) == 18
    harness.check()
    await engine.stop()


async def test_the_deadline_answers_with_what_is_resident(agent):
    harness, engine = await stocked(agent, lookup_deadline=0.05)
    await engine.store(keys(2))
    await engine.lookup(keys(2))
    harness.faulty.gate.clear()
    ask(engine, keys(6))
    assert len((await answer(engine, pending=True)).refs) == 2
    late = await answer(engine)
    assert len(late.refs) == 2
    assert late.known == 6
    harness.faulty.gate.set()
    assert harness.parts.loader.counts["loads_late"] == 1
    harness.check()
    await engine.stop()


async def test_a_released_request_leaves_no_lease_and_its_reads_are_not_wasted(agent):
    harness, engine = await stocked(agent)
    harness.faulty.gate.clear()
    ask(engine, keys(6))
    await answer(engine, pending=True)
    engine.scheduler.send(wire.Step(releases=("r",)))
    ask(engine, keys(6), "next")
    await answer(engine, "next", pending=True)
    harness.faulty.gate.set()
    assert len((await answer(engine, "next")).refs) == 6
    assert len(harness.reads()) == 6
    assert sum(session.leases.chunks for session in harness.parts.core.schedulers) == 6
    assert not engine.scheduler.received(wire.Answer)
    harness.check()
    await engine.stop()


async def test_a_failing_tier_is_a_miss_and_stays_known(agent):
    harness, engine = await stocked(agent)
    broken = keys(6)[3]
    harness.faulty.plan = lambda operation, key: TierError("broken") if key == broken else None
    ask(engine, keys(6))
    found = await answer(engine)
    assert len(found.refs) == 3
    assert found.known == 6
    harness.faulty.plan = lambda operation, key: None
    ask(engine, keys(6), "again")
    assert len((await answer(engine, "again")).refs) == 6
    assert harness.parts.lower[Tier.DISK].counts["read_failed"] == 1
    harness.check()
    await engine.stop()


async def test_a_file_that_vanished_is_forgotten(agent, tmp_path):
    harness, engine = await stocked(agent)
    next((tmp_path / "disk").glob(f"??/{keys(6)[3].hex()}.kvist")).unlink()
    ask(engine, keys(6))
    assert len((await answer(engine)).refs) == 3
    assert harness.parts.catalog.get(keys(6)[3]) is None
    harness.check()
    await engine.stop()


async def test_recomputing_is_chosen_when_it_is_faster(agent):
    harness, engine = await stocked(agent)
    fast = wire.EngineLoad(prefill_seconds_per_token=1e-12)
    engine.scheduler.send(wire.Step(load=fast))
    ask(engine, keys(6))
    found = await answer(engine)
    assert (found.refs, found.known, found.pending) == ((), 6, False)
    assert not harness.reads()
    await engine.stop()


async def test_a_tier_found_too_slow_is_measured_again_beside_requests(agent):
    harness, engine = await stocked(agent)
    tier, now = harness.parts.lower[Tier.DISK], [0.0]
    tier.speed = Speed(clock=lambda: now[0])
    tier.speed.observe(1, 1.0)
    slow = tier.speed.price.bandwidth
    engine.scheduler.send(wire.Step(load=wire.EngineLoad(prefill_seconds_per_token=1e-3)))
    assert not (await engine.lookup(keys(6))).refs
    assert not harness.reads()
    now[0] += 60
    # Nobody waits for it: this answer is there before a byte was read.
    harness.faulty.gate.clear()
    assert not (await engine.lookup(keys(6))).refs
    harness.faulty.gate.set()
    async with asyncio.timeout(DEADLINE):
        while tier.speed.price.bandwidth == slow or harness.parts.loader.is_loading(keys(1)[0]):
            await engine.lookup(keys(1, first=5000))  # an answer means that the agent has had a turn
    assert harness.reads() == keys(1)
    found = await engine.lookup(keys(6))
    assert found.tiers[0] == Tier.MEMORY
    harness.check()
    await engine.stop()


async def test_a_load_larger_than_its_share_takes_what_fits(agent):
    # 63 slots: at most 31 for loads.
    harness, engine = await stocked(agent, chunks=40)
    ask(engine, keys(40))
    found = await answer(engine)
    assert len(found.refs) == 31
    assert engine.holds(keys(31), found)
    harness.check()
    await engine.stop()


async def test_waiting_loads_are_served_in_order_when_room_comes(agent):
    harness, engine = await stocked(agent, chunks=30)
    other = keys(30, first=10_000)
    await put_on_disk(harness, engine, other)
    harness.faulty.gate.clear()
    ask(engine, keys(30), "first")
    await answer(engine, "first", pending=True)
    ask(engine, other, "second")
    await answer(engine, "second", pending=True)
    assert not set(harness.reads()) & set(other)
    harness.faulty.gate.set()
    assert len((await answer(engine, "first")).refs) == 30
    engine.scheduler.send(wire.Step(releases=("first",)))
    assert len((await answer(engine, "second")).refs) == 30
    harness.check()
    await engine.stop()


async def test_waiting_requests_keep_at_most_their_share(agent):
    """40 of 63 slots would be leased by two requests that wait: the second is answered at once."""
    harness, engine = await stocked(agent, chunks=22)
    other = keys(22, first=10_000)
    await engine.store(other)
    await engine.lookup(other)
    assert await harness.parts.writebehind.flush(DEADLINE)
    for chain in (keys(22), other):
        await engine.lookup(chain, "warm")
        harness.parts.memory.drop(harness.parts.catalog.resident(chain[20]))
        harness.parts.memory.drop(harness.parts.catalog.resident(chain[21]))
    harness.faulty.gate.clear()
    ask(engine, keys(22), "first")
    assert len((await answer(engine, "first", pending=True)).refs) == 20
    ask(engine, other, "second")
    assert len((await answer(engine, "second")).refs) == 20
    # Sharing what another one waits with costs nothing.
    ask(engine, keys(22), "sharing")
    assert len((await answer(engine, "sharing", pending=True)).refs) == 20
    harness.faulty.gate.set()
    assert len((await answer(engine, "first")).refs) == 22
    ask(engine, other, "third")
    assert len((await answer(engine, "third")).refs) == 22
    harness.check()
    await engine.stop()


async def test_a_commit_during_the_load_of_its_key_is_a_duplicate(agent):
    harness, engine = await stocked(agent, chunks=1)
    harness.faulty.gate.clear()
    ask(engine, keys(1))
    await answer(engine, pending=True)
    await engine.store(keys(1))
    harness.faulty.gate.set()
    found = await answer(engine)
    assert engine.holds(keys(1), found)
    assert harness.parts.core.counts["commits_duplicate"] == 1
    harness.check()
    await engine.stop()


async def test_disconnect_in_mid_load_frees_everything(agent):
    harness, engine = await stocked(agent)
    harness.faulty.gate.clear()
    ask(engine, keys(6))
    await answer(engine, pending=True)
    await engine.stop()
    harness.faulty.gate.set()
    second = await FakeEngine.start(harness.socket)
    found = await second.lookup(keys(6))
    assert second.holds(keys(6), found)
    assert len(found.refs) == 6
    assert harness.parts.loader.pending == 0
    harness.check()
    await second.stop()


async def test_write_behind_drops_the_least_valuable_under_pressure_and_blocks_nobody(agent):
    harness = await agent(queue=4 * 16384)
    engine = await FakeEngine.start(harness.socket)
    harness.faulty.gate.clear()
    await engine.store(keys(12))
    assert len((await engine.lookup(keys(12))).refs) == 12
    assert harness.parts.writebehind.pending_chunks <= 5
    harness.faulty.gate.set()
    assert await harness.parts.writebehind.flush(DEADLINE)
    counts = harness.parts.writebehind.counts
    assert counts["written"] + counts["dropped_pressure"] == 12
    on_disk = [chunk for chunk in keys(12) if Tier.DISK in harness.parts.catalog.get(chunk).below]
    assert 0 < len(on_disk) < 12
    assert on_disk == keys(12)[: len(on_disk)], "a chunk was kept for the disk and its parent was not"
    # The next chunk of the chain brings its ancestors along.
    await engine.store(keys(13), start=12)
    await engine.lookup(keys(13))
    assert await harness.parts.writebehind.flush(DEADLINE)
    assert all(Tier.DISK in harness.parts.catalog.get(chunk).below for chunk in keys(13))
    harness.check()
    await engine.stop()


async def test_what_pressure_drops_is_counted_in_metrics_and_stats_and_said_once(agent, caplog):
    harness = await agent(queue=4 * 16384)
    metrics = Metrics()
    metrics.watch(harness.parts)
    engine = await FakeEngine.start(harness.socket)
    harness.faulty.gate.clear()
    for first in (0, 1000):
        await engine.store(keys(12, first))
        await engine.lookup(keys(12, first))
    dropped = 24 - harness.parts.writebehind.pending_chunks
    assert dropped >= 19
    assert harness.parts.controls.stats()["counters"]["dropped_pressure"] == dropped
    series = f'kvist_agent_events_total{{reason="dropped_pressure"}} {dropped}.0'
    assert series in metrics.exposition().decode()
    said = [record for record in caplog.records if "dropped_pressure" in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]
    assert said[0].getMessage().startswith("disk tier: takes chunks slower than they are computed")
    await engine.stop()


async def test_what_was_used_again_is_written_first_and_parents_before_their_children(agent):
    harness = await agent(eviction="lru")
    engine = await FakeEngine.start(harness.socket)
    harness.faulty.gate.clear()
    chains = [keys(3, first) for first in (0, 1000, 2000, 3000)]
    for chain in chains:
        await engine.store(chain)
        await engine.lookup(chain[:1])
    await engine.lookup(chains[2])
    await engine.lookup(())
    harness.faulty.gate.set()
    assert await harness.parts.writebehind.flush(DEADLINE)
    written = [key for operation, key in harness.faulty.calls if operation == "put"]
    assert sorted(written) == sorted(key for chain in chains for key in chain)
    assert written[1:4] == chains[2]  # the first chunk of all was under way already
    for chain in chains:
        assert [key for key in written if key in chain] == chain
    harness.check()
    await engine.stop()


async def test_a_full_waiting_queue_is_neither_a_deadlock_nor_a_starvation(agent, monkeypatch):
    """Forty requests for prompts of which one or two fit at a time, and room for ten to wait."""
    monkeypatch.setattr("kvist_connector.agent.loads.MAX_PENDING", 10)
    harness, engine = await stocked(agent, chunks=20, disk_size=100 << 20)
    prompts = [keys(20, first=10_000 * number) for number in range(1, 15)]
    for prompt in prompts:
        await engine.store(prompt)
        await engine.lookup(prompt)
        await harness.clear_memory()
    harness.faulty.gate.clear()
    asked = {f"r{number}": prompts[number % len(prompts)] for number in range(40)}
    for request, prompt in asked.items():
        ask(engine, prompt, request)
    await engine.lookup((), "last")
    assert harness.parts.loader.pending == 10
    harness.faulty.gate.set()
    whole = set()
    for request, prompt in asked.items():
        found = await answer(engine, request)
        assert engine.holds(prompt, found)
        whole |= {request} if len(found.refs) == len(prompt) else set()
        engine.scheduler.send(wire.Step(releases=(request,)))
    # Those that waited got all they had planned, in turn; whoever found the queue full was answered at once.
    assert {f"r{number}" for number in range(10)} <= whole
    await engine.lookup((), "end")
    assert harness.parts.loader.pending == 0
    assert harness.parts.loader.counts["loads_late"] == 0
    harness.check()
    stats = harness.parts.controls.stats()
    assert (stats["leases"], stats["slots"]["reserved"]) == (0, stats["granted"])
    await engine.stop()


async def test_all_planned_chunks_of_a_chain_are_read_while_the_first_is_on_its_way(agent):
    harness, engine = await stocked(agent, chunks=12)
    harness.faulty.gate.clear()
    ask(engine, keys(12))
    await answer(engine, pending=True)
    async with asyncio.timeout(DEADLINE):
        while len(harness.reads()) < 12:
            await engine.lookup((), "other")
    assert sorted(harness.reads()) == sorted(keys(12))
    harness.faulty.gate.set()
    assert len((await answer(engine)).refs) == 12
    engine.scheduler.send(wire.Step(releases=("r",)))
    await engine.lookup((), "other")
    harness.check()
    await engine.stop()


async def test_a_short_load_is_not_behind_all_of_a_long_one(agent):
    """The tier reads one chunk at a time: two requests have turns."""
    harness, engine = await stocked(agent, chunks=12)
    other = keys(2, first=5000)
    await put_on_disk(harness, engine, other)
    below = FaultyStore(harness.faulty.inner)
    harness.faulty.inner = DeadlineStore(below, limit=DEADLINE, most=1)
    harness.faulty.calls.clear()
    below.gate.clear()
    ask(engine, keys(12), "long")
    ask(engine, other, "short")
    for request in ("long", "short"):
        await answer(engine, request, pending=True)
    async with asyncio.timeout(DEADLINE):
        while len(harness.reads()) < 14:
            await engine.lookup((), "other")
    below.gate.set()
    assert len((await answer(engine, "short")).refs) == 2
    assert len((await answer(engine, "long")).refs) == 12
    read = [key for operation, key in below.calls if operation == "get"]
    assert {read.index(key) for key in other} <= set(range(6))
    engine.scheduler.send(wire.Step(releases=("long", "short")))
    await engine.lookup((), "other")
    harness.check()
    await engine.stop()


async def test_a_full_disk_tier_evicts_leaves_first(agent):
    # Room for five chunks of 20 KiB.
    harness = await agent(disk_size=5 * 20480)
    engine = await FakeEngine.start(harness.socket)
    await engine.store(keys(4))
    await engine.store(keys(4, first=1000))
    await engine.lookup(keys(4, first=1000))
    assert await harness.parts.writebehind.flush(DEADLINE)
    disk = harness.parts.catalog.index(Tier.DISK)
    assert disk.bytes <= 5 * 20480
    for chain in (keys(4), keys(4, first=1000)):
        held = [chunk in disk for chunk in chain]
        assert held == sorted(held, reverse=True), "a parent left before its child"
    harness.check()
    await engine.stop()


async def test_a_full_file_system_is_counted_and_the_chunk_stays_in_memory(agent):
    harness = await agent()
    engine = await FakeEngine.start(harness.socket)
    harness.faulty.plan = lambda operation, key: StorageFull("full") if operation == "put" else None
    await engine.store(keys(2))
    await engine.lookup(keys(2))
    assert await harness.parts.writebehind.flush(DEADLINE)
    assert harness.parts.lower[Tier.DISK].counts["write_refused"] == 2
    assert len((await engine.lookup(keys(2))).refs) == 2
    harness.check()
    await engine.stop()


async def test_flush_gives_up_at_its_deadline(agent):
    harness = await agent()
    engine = await FakeEngine.start(harness.socket)
    harness.faulty.gate.clear()
    await engine.store(keys(2))
    await engine.lookup(keys(2))
    assert not await harness.parts.writebehind.flush(0.01)
    answered = await harness.parts.controls.flush({"deadline": 0.01})
    assert answered["pending_chunks"] == 2
    harness.faulty.gate.set()
    await engine.stop()


async def test_a_dead_background_task_is_fatal(agent):
    harness = await agent()

    async def dies():
        raise RuntimeError("boom")

    harness.supervisor.daemon("doomed", dies())
    async with asyncio.timeout(DEADLINE):
        await harness.supervisor.stopping.wait()
    assert "doomed died: RuntimeError: boom" in harness.supervisor.failed


async def test_what_is_stored_after_a_finished_prefill_is_of_the_answer(agent):
    harness = await agent()
    engine = await FakeEngine.start(harness.socket)
    await engine.store(keys(2))
    record = wire.RequestRecord(
        request="q", prompt_tokens=17, last_chunk_key=keys(2)[-1], hit_tokens={}, arrived=1.0,
        lookup_seconds=0.0, wait_seconds=0.0, load_seconds=0.0, prefill_seconds=0.1,
    )  # fmt: skip
    engine.scheduler.send(wire.Step(records=(record,)))
    await engine.store(keys(3), start=2)
    await engine.lookup([b"of another prompt"[:16]])  # what was sent before it is done by then
    last = harness.parts.catalog.index(Tier.MEMORY).get(keys(3)[-1])
    assert (last.visit.prompt, last.visit.decoded) == (2, 1)
    await engine.stop()
