"""What a chunk costs the agent in memory of its own, beside its slot: stated in docs/operations.md."""

import tracemalloc

import pytest

from kvist_connector.arena.geometry import HEADER_BYTES
from kvist_connector.protocol import engine as wire
from kvist_connector.testing.fake_engine import layout, prompt_keys
from kvist_connector.testing.peer_agents import PeerAgent

SLOTS = 256
PROMPT = 32  # chunks
BYTES = 64  # of a chunk


@pytest.fixture
async def agent(tmp_path):
    memory = int(SLOTS * (BYTES + HEADER_BYTES) + 3 * 4096)
    found = await PeerAgent.start(tmp_path / "agent", serves=False, memory=memory)
    yield found
    await found.check()
    await found.stop()


@pytest.fixture
def traced():
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


def prompts(count: int) -> list[list[bytes]]:
    return [prompt_keys(range(n << 20, (n << 20) + 8 * PROMPT)) for n in range(count)]


async def store(engine, some: list[list[bytes]]) -> None:
    for keys in some:
        await engine.store(keys)
        await engine.lookup(keys)
        engine.scheduler.received(wire.Evicted)


async def test_a_chunk_in_memory_costs_less_than_a_kilobyte_of_books(agent, traced):
    engine = await agent.engine(layout(layers=1, layer_bytes=BYTES))
    slots = agent.parts.memory.geometry.slots
    assert slots >= SLOTS
    given = prompts(slots // PROMPT - 2)
    await store(engine, given[:1])
    before, chunks = traced(), len(agent.parts.catalog)
    await store(engine, given[1:])
    added = len(agent.parts.catalog) - chunks
    assert added == (len(given) - 1) * PROMPT
    each = (traced() - before) / added
    assert each < 1024, f"{each:.0f} bytes"


async def test_what_is_remembered_of_evicted_chunks_is_bounded(agent, traced):
    engine = await agent.engine(layout(layers=1, layer_bytes=BYTES))
    slots = agent.parts.memory.geometry.slots
    given = prompts(6 * slots // PROMPT)
    before = traced()
    await store(engine, given[: len(given) // 2])
    halfway = traced() - before
    await store(engine, given[len(given) // 2 :])
    after = traced() - before
    assert len(agent.parts.catalog) <= slots
    assert after / slots < 2048, f"{after / slots:.0f} bytes"
    assert after < 1.3 * halfway, "the books grow with what has come and gone"
