"""An agent one of whose tiers rounds: its KV is kept apart from everybody's who wants it exact."""

import logging
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvist_connector.agent.layouts import announced
from kvist_connector.keys import chunk_keys, root_key
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.fake_engine import FakeEngine, layout
from kvist_connector.testing.whole_agent import WholeAgent

VALUES = wire.Values("bfloat16", 64)
OFFERED = layout(values=VALUES)
CHUNK = OFFERED.layers * OFFERED.layer_bytes


def body_of(key):
    """Values of about one that float8 does not have, different for each chunk."""
    draw = np.random.default_rng(list(key)).normal(size=CHUNK // 2).astype(np.float32)
    return (draw.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def values_of(body):
    return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.fixture
def agent(tmp_path):
    """Agents with these settings over the same disk and bucket, with an engine that says what its KV is."""

    @asynccontextmanager
    async def begin(folder="a", offered=OFFERED, **compression):
        (tmp_path / folder).mkdir(exist_ok=True)
        whole = await WholeAgent.start(
            tmp_path / folder,
            offered=offered,
            disk={"path": tmp_path / folder / "disk", "compression": compression.get("disk", "none")},
            object_store={
                "url": (tmp_path / "bucket").as_uri(),
                "compression": compression.get("shared", "none"),
            },
        )
        try:
            yield whole
            await whole.check()
        finally:
            await whole.stop()

    return begin


def keys_of(whole, chunks=3):
    """As the engine's scheduler half derives them: from the fingerprint that the agent announced."""
    return chunk_keys(root_key(whole.engine.workers[0].arena.fingerprint), range(8 * chunks), 8)


async def store(whole, keys):
    """The engine computes them."""
    engine = whole.engine
    for index, (key, ref) in enumerate(zip(keys, await engine.grant(len(keys)), strict=True)):
        assert engine.workers[0].fill(ref, body_of(key))
        parent = keys[index - 1] if index else bytes(16)
        engine.scheduler.send(wire.Step(commits=(wire.Commit(ref=ref, key=key, parent=parent, index=index),)))
    assert len((await engine.lookup(keys)).refs) == len(keys)
    await whole.written()


async def load(whole, keys):
    """Tiers and bytes of what the engine is given, once memory is empty."""
    await whole.post("clear", {"tier": "memory"})
    answer = await whole.engine.lookup(keys, release=False)
    bodies = [whole.engine.workers[0].read(ref) for ref in answer.refs]
    whole.engine.scheduler.send(wire.Step(releases=("r",)))
    return [Tier(number) for number in answer.tiers], bodies


async def test_chunks_come_back_rounded_and_say_so(agent):
    async with agent(disk="fp8") as whole:
        keys = keys_of(whole)
        await store(whole, keys)
        tiers, bodies = await load(whole, keys)
        assert tiers == [Tier.DISK] * 3
        for key, body in zip(keys, bodies, strict=True):
            exact, rounded = values_of(body_of(key)), values_of(body)
            assert body != body_of(key)
            assert np.abs(exact - rounded).max() <= np.abs(exact).max() / 16
        found = (await whole.post("lookup", {"keys": [key.hex() for key in keys]}))["chunks"]
        assert [chunk["lossy"] for chunk in found] == [["memory", "disk"]] * 3
    assert sum(path.stat().st_size for path in whole.folder.glob("disk/*/*.kvist")) < 3 * (
        4096 + CHUNK * 0.55
    )
    # After a restart the copies in memory and on disk are still known for what they are.
    async with agent(disk="fp8") as whole:
        found = (await whole.post("lookup", {"keys": [key.hex() for key in keys]}))["chunks"]
        assert [chunk.get("lossy") for chunk in found] == [["memory", "disk"]] * 3


async def test_exact_agents_never_meet_what_a_rounding_one_has_stored(agent):
    """Neither through a shared tier, though that one does not round, nor on the disk of an earlier agent."""
    async with agent("a", disk="fp8") as rounding:
        await store(rounding, keys_of(rounding))
        async with agent("b") as exact:
            keys = keys_of(exact)
            assert not set(keys) & set(keys_of(rounding))
            assert await load(exact, keys_of(rounding)) == ([], [])
            await store(exact, keys)
            assert (await load(exact, keys))[1] == [body_of(key) for key in keys]
    async with agent("a") as exact:
        tiers, bodies = await load(exact, keys)
        assert (tiers, bodies) == ([Tier.OBJECT] * 3, [body_of(key) for key in keys])
        assert (await exact.stats())["tiers"]["disk"]["chunks"] == 0


async def test_agents_that_round_share_what_they_have_rounded(agent):
    async with agent("a", shared="fp8") as one:
        keys = keys_of(one)
        await store(one, keys)
        async with agent("b", shared="fp8") as other:
            tiers, bodies = await load(other, keys)
            assert tiers == [Tier.OBJECT] * 3
            assert (await load(one, keys))[1] != bodies  # its own disk has them as they were computed
            found = (await other.post("lookup", {"keys": [key.hex() for key in keys]}))["chunks"]
            assert [chunk["lossy"] for chunk in found] == [["memory", "object"]] * 3


async def test_a_rounded_chunk_under_an_exact_name_is_a_miss_with_its_reason(agent, caplog):
    """As if somebody had stored it there: the header says what it is."""
    caplog.set_level(logging.WARNING)
    async with agent("a", shared="fp8") as rounding:
        keys = keys_of(rounding)
        await store(rounding, keys)
        await rounding.post("clear", {"tier": "memory"})
        rounding.parts.lower[Tier.OBJECT].coding.compression = "none"
        async with agent("b") as exact:
            exact.parts.core.hooks.layout(announced(OFFERED, True))
            assert await exact.parts.lower[Tier.OBJECT].find(keys, bytes(16), 0) == 3
            into = memoryview(bytearray(CHUNK))
            assert await exact.parts.lower[Tier.OBJECT].fetch(keys[0], [into]) is None
            assert exact.parts.lower[Tier.OBJECT].counts["lossy"] == 1
            exact.parts.core.hooks.layout(OFFERED)
        assert "object tier: lossy: chunk" in caplog.text
        # It was not ours to delete.
        assert (await load(rounding, keys))[0][0] in (Tier.OBJECT, Tier.DISK)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (wire.Values("uint8", 0, "layer a has KV of uint8"), "layer a has KV of uint8: use zstd there"),
        (wire.Values(), "does not say what its KV is"),
    ],
)
async def test_an_engine_whose_kv_cannot_be_rounded_is_refused_in_words(agent, values, words):
    async with agent(disk="fp8") as whole:
        with pytest.raises(PermissionError, match=rf"disk\.compression: 'fp8' is not possible: .*{words}"):
            await FakeEngine.start(whole.socket, layout(b"g" * 32, values=values))
    # Whoever does not round takes it.
    async with agent("c", offered=layout(b"g" * 32, values=values)) as whole:
        assert whole.engine.workers[0].arena is not None
