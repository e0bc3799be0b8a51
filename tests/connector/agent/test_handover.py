"""Offer, take, release: what a router makes a move between replicas of, agent by agent."""

import msgspec
import pytest

from kvist_connector.agent.selection import RequestError
from kvist_connector.errors import TierError
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_parts import keys_of as keys
from kvist_connector.testing.fake_engine import layout
from kvist_connector.testing.peer_agents import PeerAgent, end

pytestmark = pytest.mark.timeout(120)
BYTES = 16384


@pytest.fixture
async def start(tmp_path):
    """Starts agents that are gone at the end of the test, their books in order."""
    running = []

    async def begin(**settings):
        running.append(await PeerAgent.start(tmp_path / f"agent{len(running)}", **settings))
        return running[-1]

    yield begin
    await end(running)


def hexes(chain):
    return [key.hex() for key in chain]


def handover(agent):
    return agent.parts.controls.handover


async def offered(agent, **selection):
    return await handover(agent).offer(selection or {"all": True})


def errand(source, offer, **more):
    return {
        "source": source.url,
        "fingerprint": offer.fingerprint,
        "chunks": msgspec.to_builtins(offer.chunks),
    } | more


def places(agent, chain):
    return [[tier.label for tier in agent.parts.catalog.tiers_of(key)] for key in chain]


async def two(start, chunks=6, **settings):
    """One has chunks, the other an engine of the same model."""
    source, target = await start(), await start(**settings)
    await source.computed(keys(chunks), tags=("doc",), epoch=3)
    return source, target, await target.engine()


async def test_what_is_offered_is_taken_whole_and_then_let_go(start):
    source, target, engine = await two(start)
    offer = await offered(source)
    assert [each.key for each in offer.chunks] == hexes(keys(6))
    would = await handover(target).take(errand(source, offer, dry_run=True))
    assert (would.chunks, would.there, places(target, keys(1))) == (6, [], [[]])
    took = await handover(target).take(errand(source, offer))
    assert (took.chunks, took.tokens, took.bytes) == (6, 48, 6 * BYTES)
    assert took.there == hexes(keys(6))
    assert (await handover(target).take(errand(source, offer))).chunks == 0
    went = await handover(source).release({"keys": took.there})
    assert (went.chunks, went.bytes, went.leased) == (6, 6 * BYTES, 0)
    assert (await handover(source).release({"keys": took.there})).chunks == 0
    found = await engine.lookup(keys(6))
    assert found.tiers == bytes([Tier.MEMORY] * 6)
    assert engine.holds(keys(6), found)
    chunk = target.parts.catalog.get(keys(6)[5])
    assert (chunk.tags, chunk.epoch, chunk.below) == (("doc",), 3, set())


async def test_a_chunk_on_the_sources_disk_is_brought_up_and_sent(start, tmp_path):
    source = await start(disk={"path": tmp_path / "disk"})
    await source.computed(keys(4))
    assert await source.parts.writebehind.flush(20)
    await source.parts.controls.edits.clear({"tier": "memory"})
    target = await start()
    engine = await target.engine()
    took = await handover(target).take(errand(source, await offered(source)))
    assert took.chunks == 4
    assert engine.holds(keys(4), await engine.lookup(keys(4)))
    await handover(source).release({"keys": took.there})
    assert places(source, keys(4)) == [[]] * 4


async def test_what_was_taken_is_written_behind_like_what_was_computed(start, tmp_path):
    source, target, _ = await two(start, disk={"path": tmp_path / "disk"})
    await handover(target).take(errand(source, await offered(source)))
    assert await target.parts.writebehind.flush(20)
    assert places(target, keys(6)) == [["memory", "disk"]] * 6


async def test_what_hangs_on_a_chosen_chunk_comes_along(start):
    source, _, _ = await two(start)
    offer = await offered(source, keys=hexes(keys(6)[3:4]))
    assert [each.key for each in offer.chunks] == hexes(keys(6)[3:])


async def test_a_chunk_without_its_predecessors_is_not_taken(start):
    source, target, _ = await two(start)
    offer = await offered(source, keys=hexes(keys(6)[3:4]))
    took = await handover(target).take(errand(source, offer))
    assert (took.chunks, took.there) == (0, [])
    await handover(target).take(errand(source, await offered(source, tokens=list(range(48)))))
    assert (await handover(target).take(errand(source, offer))).there == hexes(keys(6)[3:])


async def test_what_is_needed_stays(start):
    source, _, _ = await two(start)
    # Two more chunks were computed since they were offered: what they hang on stays.
    engine = await source.computed(keys(8))
    await source.check()
    went = await handover(source).release({"keys": hexes(keys(6))})
    assert went.chunks == 0
    assert places(source, keys(8)) == [["memory"]] * 8
    # And so does what a request uses, or what is pinned.
    await engine.lookup(keys(2), release=False)
    await source.parts.controls.edits.pin({"keys": hexes(keys(6)[2:3])})
    went = await handover(source).release({"keys": hexes(keys(8))})
    assert (went.chunks, went.leased, went.pinned) == (5, 2, 1)
    engine.scheduler.send(wire.Step(releases=("r",)))


async def test_what_the_target_has_no_room_for_is_not_there(start):
    memory = 4 * (BYTES + 64) + 3 * 4096
    source, target, engine = await two(start, memory=memory)
    await engine.lookup(keys(1))
    took = await handover(target).take(errand(source, await offered(source)))
    assert took.there == hexes(keys(len(took.there)))
    assert len(took.there) < 6
    assert places(source, keys(6)) == [["memory"]] * 6


async def test_a_source_that_is_gone_is_nothing_there(start):
    source, target, _ = await two(start)
    offer = await offered(source)
    await source.unserve()
    took = await handover(target).take(errand(source, offer))
    assert (took.chunks, took.there) == (0, [])
    assert target.counts["peer_failed"] >= 1
    assert not target.parts.catalog.keys(Tier.PEER)


async def test_another_model_is_refused_in_words(start):
    source, target = await start(), await start()
    await source.computed(keys(2))
    await target.engine(layout(b"g" * 32))
    with pytest.raises(TierError, match="computes otherwise"):
        await handover(target).take(errand(source, await offered(source)))


async def test_who_serves_nobody_offers_nothing_and_who_reads_from_nobody_takes_nothing(start):
    source, alone = await start(), await start(serves=False)
    await source.computed(keys(2))
    await alone.engine()
    with pytest.raises(TierError, match=r"set peer\.host"):
        await handover(alone).offer({"all": True})
    with pytest.raises(TierError, match=r"peer\.host or peer\.urls"):
        await handover(alone).take(errand(source, await offered(source)))


@pytest.mark.parametrize(
    "source", ["file:///etc/passwd", "http://a/path", "https://a:1", "gopher://x", "http://u:p@a:1", ""]
)
async def test_a_source_is_a_peer_port_and_nothing_else(start, source):
    target = await start()
    body = {"source": source, "fingerprint": "", "chunks": []}
    with pytest.raises(RequestError) as error:
        await handover(target).take(body)
    assert error.value.field == "source"


async def test_at_most_so_many_chunks_are_asked_for_at_a_time(start):
    target = await start()
    chunk = {"key": "00" * 16, "parent": "00" * 16, "index": 0}
    body = {"source": "http://a:1", "fingerprint": "", "chunks": [chunk] * 4097}
    with pytest.raises(RequestError) as error:
        await handover(target).take(body)
    assert error.value.field == "chunks"
