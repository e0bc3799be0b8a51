"""Against a real agent process: what an engine commits is where the router sends, through kills of either."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing import services
from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fake_engine import FakeEngine as EngineHalf
from kvist_connector.testing.fake_engine import prompt_keys
from kvist_router.mind.interface import Metadata, Report
from kvist_router.testing.engine import FakeEngine

CHUNK = 8  # tokens of a chunk in the stand-in engine's layout
TOKENS = list(range(60 * CHUNK + 3))
STORED = 40  # chunks; their prefill is far above what counts as equal
KEYS = prompt_keys(TOKENS)
DONE = {"draining": True, "routers": [], "requests": 0, "chunks": 0, "bytes": 0}


async def decide(running: Any) -> Any:
    body = json.dumps({"model": "m", "prompt": TOKENS}).encode()
    decision = await running.mind.decide(body, Metadata("completions"))
    await running.mind.report(decision.id, Report("cancelled"))
    return decision


@pytest.fixture
async def agents(tmp_path):
    started = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        started.append(await AgentProcess.start(tmp_path / name))
    yield started
    for agent in started:
        if agent._process.returncode is None:
            await agent.kill()


@pytest.fixture
async def connect():
    """Connects the engine's half to an agent; all are closed at the end."""
    connected = []

    async def start(agent: AgentProcess) -> EngineHalf:
        connected.append(await EngineHalf.start(agent.socket))
        return connected[-1]

    yield start
    for half in connected:
        await half.stop()


async def test_commits_reach_the_router_until_the_agent_is_killed(router, until, agents, connect) -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        listed = [
            {"name": name, "url": engine.url, "agent": agent.url}
            for name, engine, agent in zip("ab", (first, second), agents, strict=True)
        ]
        running = await router(replicas=listed, ready=False)
        replicas = running.mind.replicas
        halves = [await connect(agent) for agent in agents]
        await until(lambda: len(replicas) == 2 and all(item.healthy for item in replicas.values()))
        await until(lambda: all(item.chunk_tokens == CHUNK for item in replicas.values()))
        await halves[1].store(KEYS[:STORED])
        await until(lambda: replicas["b"].mirror.has(KEYS[STORED - 1]))
        decision = await decide(running)
        assert (decision.replica, decision.predicted_tokens) == ("b", STORED * CHUNK)

        record = wire.RequestRecord(
            request=decision.id, prompt_tokens=len(TOKENS), last_chunk_key=KEYS[-1], hit_tokens={1: 32},
            arrived=0.0, lookup_seconds=0.0, wait_seconds=0.0, load_seconds=0.0, prefill_seconds=0.1,
        )  # fmt: skip
        halves[1].scheduler.send(wire.Step(records=(record,)))
        kept = running.mind.records.get(decision.id)
        await until(lambda: kept.actual is not None)
        assert kept.actual.hit_tokens == {"memory": 32}

        await agents[1].kill()
        await until(lambda: not replicas["b"].feed_live)


async def test_a_drain_ends_when_the_routers_requests_have(router, until, agents, tmp_path) -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        listed = [
            {"name": name, "url": engine.url, "agent": agent.url}
            for name, engine, agent in zip("ab", (first, second), agents, strict=True)
        ]
        running = await router(replicas=listed)
        going = {}
        while "a" not in going:  # strangers to each other, so that the less busy one is taken
            body = json.dumps({"model": "m", "prompt": [len(going) + 1] * 600}).encode()
            decision = await running.mind.decide(body, Metadata("completions"))
            going[decision.replica] = decision
        waiting = asyncio.create_task(agents[0].post("/v1/kvist/drain", {"deadline": 60}))
        async with asyncio.timeout(60):
            while (await agents[0].get("/v1/kvist/drain"))[1] != {**DONE, "requests": 1}:
                pass
        assert not waiting.done()
        assert (await decide(running)).replica == "b"
        await running.mind.report(going["a"].id, Report("ended"))
        assert await waiting == (200, DONE)
        await agents[0].post("/v1/kvist/drain", {"undo": True})
        await until(lambda: running.mind.replicas["a"].takes)


@pytest.mark.skipif(bool(services.missing()), reason=services.missing() or "installed")
async def test_what_one_agent_wrote_to_redis_the_router_counts_for_both(
    router, until, connect, tmp_path
) -> None:
    redis = services.RedisProcess(tmp_path / "redis")
    await redis.start()
    agents, written = [], KEYS[:20]  # an agent loads into half of its slots at most
    for name in "ab":
        (tmp_path / name).mkdir()
        agents.append(await AgentProcess.start(tmp_path / name, redis__urls=redis.url))
    try:
        async with FakeEngine() as first, FakeEngine() as second:
            listed = [
                {"name": name, "url": engine.url, "agent": agent.url}
                for name, engine, agent in zip("ab", (first, second), agents, strict=True)
            ]
            running = await router(replicas=listed, ready=False)
            mirrors = running.mind.replicas
            halves = [await connect(agent) for agent in agents]
            await until(lambda: len(mirrors) == 2 and all(item.fingerprinted for item in mirrors.values()))
            await halves[0].store(written)
            await until(lambda: mirrors["b"].mirror.hit(KEYS).stored == bytes([Tier.REDIS] * len(written)))
            # And what the router believes of "b" is what its agent finds.
            found = await halves[1].lookup(written)
            assert found.known == len(written)
            assert set(found.tiers) == {Tier.REDIS}
            await redis.kill()
            await halves[1].lookup(prompt_keys(range(10**6, 10**6 + 8 * CHUNK)))  # b notices
            await until(lambda: Tier.REDIS not in mirrors["b"].mirror.hit(KEYS).stored)
    finally:
        for agent in agents:
            await agent.kill()
        await redis.kill()
