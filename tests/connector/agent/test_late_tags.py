"""Tags that come after a chunk was stored below are in its copies too: rules find them after any restart."""

import asyncio

import pytest

from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.whole_agent import WholeAgent, keys_of

pytestmark = pytest.mark.timeout(120)
CHAIN = keys_of(3)


@pytest.fixture
async def start(tmp_path):
    """Starts agents on one bucket; the folder of an earlier one is gone unless it is kept."""
    running = []

    async def begin(name, **more):
        (tmp_path / name).mkdir(exist_ok=True)
        settings = {"object_store": {"url": (tmp_path / "bucket").as_uri()}, "shutdown_deadline": 0} | more
        running.append(await WholeAgent.start(tmp_path / name, **settings))
        return running[-1]

    yield begin
    for agent in running:
        if agent.running:
            await agent.check()
        await agent.stop()


def disk(folder):
    return {"disk": {"path": folder / "disk", "size": "10Mi", "compression": "none"}}


async def used(agent, *tags):
    """A request with the tags hits the chain."""
    message = wire.Lookup(request="t", keys=b"".join(CHAIN), tokens=24, tags=tags)
    agent.engine.scheduler.send(message)
    answer = await agent.engine.scheduler.expect(
        wire.Answer, lambda found: found.request == "t" and not found.pending
    )
    agent.engine.scheduler.send(wire.Step(releases=("t",)))
    assert len(answer.refs) == 3


async def stored(agent, tags=("early",)):
    await agent.engine.store(CHAIN, tags=tags)
    await agent.computed(CHAIN)
    await agent.written()


async def gone(agent):
    """Nothing of the chain can be had."""
    return not await agent.found(CHAIN, memory=True)


async def test_a_rule_on_a_late_tag_finds_what_is_on_disk_after_a_restart(start, tmp_path):
    agent = await start("one", **disk(tmp_path))
    await stored(agent)
    await used(agent, "late")
    await agent.written()
    await agent.post("clear", {"tier": "memory"})
    await agent.stop()
    again = await start("one", **disk(tmp_path))
    assert (await again.post("retire", {"tag": "late"}))["chunks"] == 3
    assert await gone(again)


async def test_a_rule_on_a_late_tag_finds_a_shared_copy_though_the_agent_that_knew_is_gone(start):
    agent = await start("one")
    await stored(agent)
    await used(agent, "late")
    await agent.written()
    assert (await agent.stats())["tier_counters"]["object"]["retagged"] == 3
    await agent.stop()
    other = await start("two")
    assert await other.found(CHAIN, memory=True) == [Tier.OBJECT] * 3
    found = await other.post("lookup", {"keys": [key.hex() for key in CHAIN]})
    assert [chunk["tags"] for chunk in found["chunks"]] == [["early", "late"]] * 3
    assert (await other.post("retire", {"tag": "late"}))["chunks"] == 3
    assert await gone(other)


async def test_a_chunk_that_two_agents_computed_has_the_tags_of_both_in_the_shared_tier(start):
    first, second = await start("one"), await start("two")
    await second.post("clear", {})
    await stored(first, ("a",))
    await second.engine.store(CHAIN, tags=("b",))
    await second.computed(CHAIN)
    await second.written()
    for agent in (first, second):
        await agent.stop()
    third = await start("three")
    await third.found(CHAIN, memory=True)
    found = await third.post("lookup", {"keys": [key.hex() for key in CHAIN]})
    assert [chunk["tags"] for chunk in found["chunks"]] == [["a", "b"]] * 3


async def test_tags_that_were_not_written_in_time_are_written_after_the_restart(start, monkeypatch):
    agent = await start("one")
    await stored(agent)
    monkeypatch.setattr(agent.parts.lower[Tier.OBJECT], "retag", never)
    await used(agent, "late")
    await agent.stop()
    again = await start("one")
    await again.written()
    assert (await again.stats())["tier_counters"]["object"]["retagged"] == 3


async def never(chunk, parts):
    await asyncio.Event().wait()


async def test_a_copy_that_cannot_have_the_tags_any_more_is_given_up(start, tmp_path, monkeypatch):
    """Its chunk has left memory before it was written anew."""
    agent = await start("one", **disk(tmp_path))
    await stored(agent)
    lower, held = agent.parts.lower[Tier.DISK], asyncio.Event()
    retag = lower.retag

    async def slowly(chunk, parts):
        await held.wait()
        return await retag(chunk, parts)

    monkeypatch.setattr(lower, "retag", slowly)
    await used(agent, "late")
    await agent.post("clear", {"tier": "memory"})
    held.set()
    await agent.written()
    # The first one was being looked at; the others have gone.
    assert (await agent.stats())["tiers"]["disk"]["chunks"] == 1


async def test_the_same_tags_again_write_nothing(start):
    agent = await start("one")
    await stored(agent)
    await used(agent, "early")
    await agent.written()
    assert not (await agent.stats())["tier_counters"]["object"].get("retagged")
