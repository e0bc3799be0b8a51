"""Controls by selector: pin, unpin, prefetch, clear, move, over a real engine connection and a disk tier."""

import asyncio

import pytest

from kvist_connector.agent.selection import RequestError
from kvist_connector.errors import TierError
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.agent_parts import DEADLINE, AgentParts
from kvist_connector.testing.agent_parts import keys_of as keys
from kvist_connector.testing.fake_engine import Connection, FakeEngine

BYTES = 16384
TOKENS = list(range(48))  # of six chunks: `keys(6)`


def hexes(chain):
    return [key.hex() for key in chain]


@pytest.fixture
async def agent(tmp_path):
    """An agent with six chunks in memory and on disk, and its engine."""
    harness = await AgentParts.over_disk(tmp_path, memory=32 * (BYTES + 64) + 8192)
    engine = await FakeEngine.start(harness.socket)
    await engine.store(keys(6))
    await settled(engine)
    await harness.written()
    yield harness, engine
    harness.check()
    await engine.stop()
    await harness.stop()


async def settled(engine):
    """The agent has taken all messages so far: they are answered in order."""
    await engine.lookup(keys(1, first=9999))


def places(harness, chain):
    return [[tier.label for tier in harness.parts.catalog.tiers_of(key)] for key in chain]


async def tag(harness, engine, chain, *tags):
    """Another request with these tags uses the chunks; their copies have the tags afterwards."""
    message = wire.Lookup(request="t", keys=b"".join(chain), tokens=8 * len(chain), tags=tags)
    engine.scheduler.send(message)
    await engine.scheduler.expect(wire.Answer, lambda answer: answer.request == "t" and not answer.pending)
    engine.scheduler.send(wire.Step(releases=("t",)))
    await settled(engine)
    await harness.written()


@pytest.mark.parametrize(
    "selector",
    [{"tokens": TOKENS}, {"keys": hexes(keys(6))}, {"all": True}, {"tag": "doc"}],
    ids=lambda selector: next(iter(selector)),
)
async def test_every_selector_clears_and_asking_again_changes_nothing(agent, selector):
    harness, engine = agent
    await tag(harness, engine, keys(6), "doc")
    edits = harness.parts.controls.edits
    would = await edits.clear(selector | {"dry_run": True})
    assert places(harness, keys(6)) == [["memory", "disk"]] * 6
    did = await edits.clear(selector)
    assert (did["chunks"], did["tokens"]) == (12, 48)
    assert did["bytes"] == 12 * BYTES + 6 * 4096
    assert would == did | {"dry_run": True}
    again = await edits.clear(selector)
    assert (again["chunks"], again["tokens"], again["bytes"]) == (0, 0, 0)
    assert not (await engine.lookup(keys(6))).refs


async def test_what_hangs_on_a_cleared_chunk_goes_too(agent):
    harness, _ = agent
    did = await harness.parts.controls.edits.clear({"keys": hexes(keys(6)[2:3]), "tier": "memory"})
    assert (did["chunks"], did["tokens"]) == (4, 32)
    assert places(harness, keys(6)) == [["memory", "disk"]] * 2 + [["disk"]] * 4


async def test_a_chunk_in_use_stays_and_is_counted(agent):
    harness, engine = agent
    await engine.lookup(keys(2), release=False)
    did = await harness.parts.controls.edits.clear({"tokens": TOKENS, "tier": "memory"})
    assert (did["chunks"], did["leased"]) == (4, 2)


async def test_a_pinned_chunk_is_not_evicted_until_the_pin_ends(agent):
    harness, engine = agent
    edits = harness.parts.controls.edits
    assert (await edits.pin({"tokens": TOKENS, "seconds": 3600}))["chunks"] == 6
    for number in range(1, 13):
        await engine.store(keys(3, first=1000 * number))
        await settled(engine)
        await harness.written()
    assert places(harness, keys(6)) == [["memory", "disk"]] * 6
    assert len(harness.parts.catalog.keys(Tier.MEMORY)) < 36
    assert (await edits.clear({"tier": "memory"}))["pinned"] == 6
    assert places(harness, keys(6)) == [["memory", "disk"]] * 6
    assert (await edits.unpin({"all": True}))["chunks"] == 6
    assert (await edits.unpin({"all": True}))["chunks"] == 0
    assert (await edits.clear({"tier": "memory"}))["chunks"] == 6


async def test_pins_expire_by_themselves(agent):
    harness, engine = agent
    assert (await harness.parts.controls.edits.pin({"tokens": TOKENS, "seconds": 1e-6}))["chunks"] == 6
    async with asyncio.timeout(DEADLINE):
        while harness.parts.controls.stats()["pinned"]:
            await settled(engine)  # each is a question that waits for its answer
    assert (await harness.parts.controls.edits.clear({"tier": "memory"}))["pinned"] == 0


async def test_a_pin_ends_with_the_last_copy_of_its_chunk(agent):
    harness, engine = agent
    edits = harness.parts.controls.edits
    await edits.pin({"tokens": TOKENS})
    assert (await edits.clear({"keys": hexes(keys(6)[3:]), "pinned": True}))["chunks"] == 6
    await settled(engine)
    assert harness.parts.controls.stats()["pinned"] == 3
    await edits.clear({"all": True, "pinned": True, "tier": "disk"})
    engine.scheduler.send(wire.Step(bad_keys=keys(3)[2]))
    await settled(engine)
    assert harness.parts.controls.stats()["pinned"] == 2
    await engine.store(keys(6), start=2)
    await settled(engine)
    lookup = await harness.parts.controls.lookup({"tokens": TOKENS})
    assert [chunk.get("pinned", False) for chunk in lookup["chunks"]] == [True] * 2 + [False] * 4


async def test_who_is_refused_is_given_nothing(agent):
    harness, engine = agent
    hello = wire.Hello(protocol=99, role="scheduler", engine="other", member="m", rank=0, pid=1)
    refused = await Connection.open(harness.socket, hello)
    refused.send(wire.Lookup(request="r", keys=b"".join(keys(6)), tokens=48))
    await refused.expect(wire.Refused)
    await refused.close()
    await settled(engine)
    assert (await harness.parts.controls.edits.clear({"tier": "memory"}))["leased"] == 0


async def test_a_key_given_twice_is_one_chunk(agent):
    harness, _ = agent
    assert (await harness.parts.controls.edits.pin({"keys": hexes(keys(1)) * 3}))["chunks"] == 1


async def test_pins_may_hold_half_of_the_arena(agent):
    harness, engine = agent
    other = keys(24, first=1000)
    await engine.store(other)
    await settled(engine)
    done = await harness.parts.controls.edits.pin({"all": True})
    slots = harness.parts.memory.slots.size
    assert (done["chunks"], done["refused"]) == (slots // 2, 30 - slots // 2)


async def test_prefetch_brings_a_prefix_into_memory(agent):
    harness, engine = agent
    await harness.clear_memory()
    edits = harness.parts.controls.edits
    assert (await edits.prefetch({"tokens": TOKENS, "dry_run": True}))["chunks"] == 6
    assert places(harness, keys(6)) == [["disk"]] * 6
    did = await edits.prefetch({"tokens": TOKENS[:32]})
    assert (did["chunks"], did["tokens"], did["bytes"], did["missing"]) == (4, 32, 4 * BYTES, 0)
    assert places(harness, keys(6)) == [["memory", "disk"]] * 4 + [["disk"]] * 2
    assert (await edits.prefetch({"tokens": TOKENS[:32]}))["chunks"] == 0
    assert engine.holds(keys(4), await engine.lookup(keys(4)))


async def test_a_move_leaves_one_copy_and_a_copy_leaves_two(agent):
    harness, engine = agent
    edits = harness.parts.controls.edits
    assert (await edits.move({"tokens": TOKENS, "to": "disk"}))["chunks"] == 6
    assert places(harness, keys(6)) == [["disk"]] * 6
    assert (await edits.move({"tokens": TOKENS, "to": "disk"}))["chunks"] == 0
    assert (await edits.move({"tokens": TOKENS, "to": "memory", "copy": True}))["chunks"] == 6
    assert places(harness, keys(6)) == [["memory", "disk"]] * 6
    assert (await edits.move({"tokens": TOKENS, "to": "memory"}))["chunks"] == 6
    assert places(harness, keys(6)) == [["memory"]] * 6
    assert engine.holds(keys(6), await engine.lookup(keys(6)))


async def test_a_move_that_the_disk_refuses_leaves_the_chunk_where_it_was(agent):
    harness, _ = agent
    edits = harness.parts.controls.edits
    await edits.move({"all": True, "to": "memory"})
    harness.faulty.plan = lambda operation, key: TierError("down") if operation == "put" else None
    did = await edits.move({"tokens": TOKENS, "to": "disk"})
    assert (did["chunks"], did["missing"]) == (0, 6)
    assert places(harness, keys(6)) == [["memory"]] * 6


async def test_compressed_chunks_take_less_and_are_read_as_they_were(agent):
    harness, engine = agent
    edits = harness.parts.controls.edits
    used = (await harness.faulty.inner.capacity()).used
    foretold = await edits.compress({"tokens": TOKENS, "dry_run": True})
    did = await edits.compress({"tokens": TOKENS, "tier": "disk"})
    assert (foretold["chunks"], foretold["bytes"]) == (did["chunks"], did["bytes"]) == (6, 6 * BYTES)
    assert did["missing"] == 0
    left = (await harness.faulty.inner.capacity()).used
    assert used - left == did["bytes"] - did["bytes_after"] > 0
    assert (await edits.compress({"tokens": TOKENS}))["chunks"] == 0
    await edits.clear({"tier": "memory"})
    assert engine.holds(keys(6), await engine.lookup(keys(6)))
    back = await edits.decompress({"all": True})
    assert (back["chunks"], back["bytes"], back["bytes_after"]) == (6, did["bytes_after"], did["bytes"])
    assert (await harness.faulty.inner.capacity()).used == used
    await edits.clear({"tier": "memory"})
    assert engine.holds(keys(6), await engine.lookup(keys(6)))


async def test_chunks_of_memory_are_not_compressed(agent):
    harness, _ = agent
    with pytest.raises(RequestError, match="never compressed"):
        await harness.parts.controls.edits.compress({"all": True, "tier": "memory"})


async def test_a_chunk_that_could_not_be_written_anew_is_not_believed_to_be_there(agent):
    harness, engine = agent
    harness.faulty.plan = lambda operation, key: TierError("down") if operation == "put" else None
    with pytest.raises(TierError, match="disk: down"):
        await harness.parts.controls.edits.compress({"tokens": TOKENS})
    assert places(harness, keys(6)) == [["memory"]] + [["memory", "disk"]] * 5
    assert engine.holds(keys(6), await engine.lookup(keys(6)))


async def test_what_is_cleared_while_it_is_written_anew_does_not_come_back(agent):
    harness, _ = agent
    edits = harness.parts.controls.edits

    def clear(operation, key):
        if operation == "put":
            harness.parts.lower[Tier.DISK].drop_all()

    harness.faulty.plan = clear
    assert (await edits.compress({"keys": hexes(keys(1))}))["chunks"] == 0
    await harness.parts.lower[Tier.DISK].settled()
    assert [item async for item in harness.faulty.inner.items()] == []


async def test_tags_of_every_request_that_uses_a_chunk_count(agent):
    harness, engine = agent
    await tag(harness, engine, keys(6), "doc")
    await tag(harness, engine, keys(2), "mail")
    lookup = await harness.parts.controls.lookup({"tokens": TOKENS})
    assert [chunk.get("tags") for chunk in lookup["chunks"]] == [("doc", "mail")] * 2 + [("doc",)] * 4


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "tokens"),
        ({"tokens": [1], "tag": "x"}, "tag"),
        ({"text": "hello"}, "text"),
        ({"messages": []}, "messages"),
        ({"keys": ["zz"]}, "keys"),
        ({"tag": "x", "salt": "y"}, "salt"),
        ({"all": True, "lora_revision": "2"}, "lora_revision"),
        ({"tokens": [-1] * 8}, "tokens"),
        ({"tokens": [1], "seconds": 0}, "seconds"),
        ({"nonsense": 1}, None),
    ],
)
async def test_a_wrong_selection_names_its_field(agent, body, field):
    harness, _ = agent
    with pytest.raises(RequestError) as error:
        await harness.parts.controls.edits.pin(body)
    assert error.value.field == field


async def test_an_adapter_alone_does_not_clear_everything(agent):
    harness, _ = agent
    with pytest.raises(RequestError) as error:
        await harness.parts.controls.edits.clear({"lora": "support"})
    assert error.value.field == "lora"
    assert (await harness.parts.controls.lookup({"all": True}))["chunks"]
