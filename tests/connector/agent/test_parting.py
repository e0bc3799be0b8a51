"""A draining agent without a shared tier leaves its most valuable chunks to its peers."""

import asyncio

import pytest

from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_parts import keys_of as keys
from kvist_connector.testing.peer_agents import PeerAgent, end
from kvist_connector.testing.ports import free_port

pytestmark = pytest.mark.timeout(120)
BYTES = 16384


@pytest.fixture
async def pool(tmp_path):
    """Agents that all have the same list of peers, as those of one template have."""
    running = []

    async def begin(count, listed=None, **settings):
        ports = [free_port() for _ in range(count)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for number, (port, url) in enumerate(zip(ports, urls, strict=True)):
            peer = {"urls": urls if listed is None else listed(urls, number), "address": url}
            agent = await PeerAgent.start(tmp_path / f"a{number}", serves=False, peer=peer, **settings)
            await agent.serve(port)
            running.append(agent)
        return running

    yield begin
    await end(running)


def memory(agent):
    return set(agent.parts.catalog.keys(Tier.MEMORY))


async def drain(agent, deadline=60):
    return await agent.parts.controls.drain({"deadline": deadline})


async def test_what_is_drained_is_copied_to_the_peers_whole_chain_by_whole_chain(pool):
    gone, *others = await pool(3)
    for agent in others:
        await agent.engine()
    chains = [keys(3, first=100 * number) for number in range(6)]
    for chain in chains:
        await gone.computed(chain, tags=("doc",), epoch=5)
    left = await drain(gone)
    assert (left.draining, left.chunks, left.bytes) == (True, 0, 0)
    assert memory(gone) == {key for chain in chains for key in chain}
    for chain in chains:
        having = [agent for agent in others if set(chain) <= memory(agent)]
        assert len(having) == 1
        reader = having[0].engines[-1]
        assert reader.holds(chain, await reader.lookup(chain))
        assert having[0].parts.catalog.get(chain[0]).tags == ("doc",)
        assert having[0].parts.catalog.get(chain[0]).epoch == 5
    assert gone.parts.core.counts["parting_given"] == 18
    # Asked again, nothing is sent twice.
    await drain(gone)
    assert gone.parts.core.counts["parting_given"] == 18


async def test_no_peer_is_asked_for_more_than_its_share_and_the_most_valuable_goes_first(pool):
    gone, other = await pool(2, memory=16 * (BYTES + 64) + 3 * 4096, eviction="lru")
    await other.engine()
    for number in range(4):
        engine = await gone.computed(keys(3, first=100 * number))
    assert gone.parts.memory.slots.size == 16
    await engine.lookup(keys(3))  # the newest use
    await drain(gone)
    assert memory(other) >= set(keys(3))
    assert len(memory(other)) <= 4


async def test_a_tier_that_is_shared_already_has_it(pool, tmp_path):
    gone, other = await pool(2, object_store={"url": f"file://{tmp_path}/objects"})
    await other.engine()
    await gone.computed(keys(3))
    await drain(gone)
    assert not memory(other)
    assert gone.parts.core.counts["parting_given"] == 0


async def test_a_peer_that_knows_others_only_takes_nothing_and_the_drain_says_what_was_left(pool, caplog):
    gone, other = await pool(2, listed=lambda urls, number: urls if number == 0 else ["http://127.0.0.1:9"])
    await other.engine()
    await gone.computed(keys(3))
    left = await drain(gone)
    assert (left.chunks, left.bytes) == (3, 3 * BYTES)
    assert not memory(other)
    assert gone.parts.core.counts["parting_failed"] >= 1
    assert "takes nothing" in caplog.text


async def test_what_one_peer_does_not_take_is_given_to_another(pool):
    gone, other, dead, leaving = await pool(4)
    await other.engine()
    await leaving.engine()
    await dead.unserve()
    await leaving.parts.controls.drain({"deadline": 0})
    chains = [keys(2, first=100 * number) for number in range(6)]
    for chain in chains:
        await gone.computed(chain)
    left = await drain(gone)
    assert (left.chunks, left.bytes) == (0, 0)
    assert memory(other) == {key for chain in chains for key in chain}
    assert not memory(leaving)


async def test_a_peer_that_is_gone_or_has_no_engine_holds_nothing_up(pool):
    gone, bare, dead = await pool(3)
    await dead.unserve()
    for number in range(6):
        await gone.computed(keys(2, first=100 * number))
    left = await drain(gone)
    assert left.chunks == 12
    assert not memory(bare)


async def test_a_drain_that_is_taken_back_stops_giving(pool):
    gone, other = await pool(2)
    await other.engine()
    await gone.computed(keys(3))
    parting, asked, go_on = gone.parts.controls._drain.parting, asyncio.Event(), asyncio.Event()
    connect = parting.connect

    def slow(peer):
        transfer = connect(peer)
        give = transfer.give

        async def held(take):
            asked.set()
            await go_on.wait()
            return await give(take)

        transfer.give = held
        return transfer

    parting.connect = slow
    draining = asyncio.create_task(drain(gone))
    await asked.wait()
    assert (await gone.parts.controls.drain({"undo": True})).chunks == 3
    go_on.set()
    assert not (await draining).draining
    assert memory(other) == set(keys(3))
