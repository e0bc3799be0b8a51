"""A tenant holds no more than its quota on one agent, and pays for it with its own chunks."""

from __future__ import annotations

import pytest

from kvist_connector.agent.quota import ALIKE_SECONDS, Quotas
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tags import QUOTA, TENANT
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_parts import AgentParts, answer
from kvist_connector.testing.agent_parts import keys_of as keys
from kvist_connector.testing.fake_engine import FakeEngine

CHUNK_TOKENS = 8


def red(chunks: int) -> tuple[str, ...]:
    """Tags of a tenant that may hold so many chunks."""
    return f"{TENANT}red", f"{QUOTA}{chunks * CHUNK_TOKENS}"


@pytest.fixture
async def agent(tmp_path):
    found = await AgentParts.over_disk(tmp_path)
    yield found
    found.check()
    await found.stop()


@pytest.fixture
async def engine(agent):
    made = await FakeEngine.start(agent.socket)
    yield made
    await made.stop()


async def seen(agent, engine) -> None:
    """The agent has handled all that was sent before, and nothing is young any more."""
    engine.scheduler.send(wire.Lookup(request="seen", keys=bytes(16), tokens=CHUNK_TOKENS))
    await answer(engine, "seen")
    await agent.written()
    agent.parts.memory.settle_fresh()


def held(agent, chain) -> int:
    catalog = agent.parts.catalog
    return sum(bool(catalog.tiers_of(key)) for key in chain)


async def test_the_tenants_own_oldest_chunks_go_first(agent, engine) -> None:
    one, two, blue = keys(3), keys(3, first=100), keys(3, first=200)
    await engine.store(blue, tags=(f"{TENANT}blue", f"{QUOTA}{100 * CHUNK_TOKENS}"))
    await engine.store(one, tags=red(4))
    await seen(agent, engine)
    await engine.store(two, tags=red(4))
    await seen(agent, engine)
    assert (held(agent, one), held(agent, two), held(agent, blue)) == (1, 3, 3)
    assert held(agent, one[:1]) == 1  # a chain goes from its end
    stats = agent.parts.controls.stats()
    assert stats["counters"]["quota_evicted"] == 2
    assert stats["tenants"] == {
        "blue": {"tokens": 3 * CHUNK_TOKENS, "cache_tokens": 100 * CHUNK_TOKENS},
        "red": {"tokens": 4 * CHUNK_TOKENS, "cache_tokens": 4 * CHUNK_TOKENS},
    }
    await agent.parts.lower[Tier.DISK].settled()
    assert agent.parts.controls.stats()["tiers"]["disk"]["chunks"] == 7


async def test_a_prompt_longer_than_the_quota_is_kept_as_far_as_it_goes(agent, engine) -> None:
    long = keys(6)
    await engine.store(long, tags=red(4))
    await seen(agent, engine)
    assert held(agent, long) == held(agent, long[:4]) == 4
    assert agent.parts.controls.stats()["counters"]["quota_refused"] > 0


async def test_the_quota_changes_with_the_next_request_and_is_no_tag_of_a_chunk(agent, engine) -> None:
    one, two = keys(4), keys(1, first=100)
    await engine.store(one, tags=red(8))
    await seen(agent, engine)
    assert agent.parts.catalog.get(one[0]).tags == (f"{TENANT}red",)
    engine.scheduler.send(wire.Lookup(request="r", keys=b"".join(two), tokens=8, tags=red(2)))
    await engine.store(two, tags=red(2))
    await seen(agent, engine)
    assert held(agent, one) == 1
    assert held(agent, two) == 1


async def test_who_has_no_quota_is_not_counted(agent, engine) -> None:
    one, two = keys(20), keys(20, first=1000)
    await engine.store(one, tags=("tag",))
    await engine.store(two, tags=(f"{TENANT}red",))
    await seen(agent, engine)
    assert held(agent, one) == held(agent, two) == 20


async def test_chunks_that_are_in_use_stay_and_nothing_more_is_stored(agent, engine) -> None:
    one, two = keys(3), keys(2, first=100)
    await engine.store(one, tags=red(3))
    await seen(agent, engine)
    await engine.lookup(one, "holder", release=False)
    await engine.store(two, tags=red(3))
    await seen(agent, engine)
    assert (held(agent, one), held(agent, two)) == (3, 0)


async def test_the_use_of_a_chain_keeps_it_longer(agent, engine) -> None:
    now = [0.0]
    parts = agent.parts
    parts.memory._clock = lambda: now[0]
    quotas = Quotas(parts.memory, parts.catalog, {Tier.DISK: parts.lower[Tier.DISK]}, lambda: now[0])
    parts.core.quotas = quotas
    one, two, three = keys(2), keys(2, first=100), keys(1, first=200)
    for chain in (one, two):
        await engine.store(chain, tags=red(4))
        await seen(agent, engine)
        now[0] += 2 * ALIKE_SECONDS
    for key in one:
        parts.catalog.touch(parts.catalog.get(key), now[0])
    await engine.store(three, tags=red(4))
    await seen(agent, engine)
    assert (held(agent, one), held(agent, two), held(agent, three)) == (2, 1, 1)
