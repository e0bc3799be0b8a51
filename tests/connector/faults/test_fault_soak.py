"""Minutes of load on two agents over disk, Redis and S3 while all of them fail in turn and at once."""

import asyncio
import os
import random
import time
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.connector.faults.left_behind import whole
from tests.connector.faults.soak_faults import FAULTS, World
from tests.connector.faults.soak_load import Engine, Progress

from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing import services
from kvist_connector.testing.fault_proxy import FaultProxy
from kvist_connector.testing.ports import free_port

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(services.missing()), reason=services.missing() or "installed"),
    pytest.mark.timeout(1200),
]
SOAK_SECONDS = float(os.environ.get("KVIST_SOAK_SECONDS", "180"))
NAMES = ("one", "two")  # of the agents, peers of each other
ENGINES = 2  # of each agent
LASTS = 15  # requests that end while a fault lasts, and between two
DEADLINE = 60.0
TIERS = (Tier.MEMORY, Tier.DISK, Tier.REDIS, Tier.OBJECT, Tier.PEER)
ALONE = {"agent killed", "agent stopped", "no descriptors"}  # others need the agent that is their victim


@asynccontextmanager
async def world_of(folder):
    async with AsyncExitStack() as stack:
        redis, s3 = services.RedisProcess(folder / "redis"), services.S3Process(folder / "s3")
        for server in (redis, s3):
            await server.start()
            stack.push_async_callback(server.kill)
        ports = {name: free_port() for name in NAMES}
        peers = {name: FaultProxy(port) for name, port in ports.items()}
        proxies = FaultProxy(redis.port), FaultProxy(s3.port)
        for proxy in (*proxies, *peers.values()):
            await proxy.start()
            stack.push_async_callback(proxy.close)
        world = World(folder, redis, s3, *proxies, ports, peers)
        try:
            for name in NAMES:
                (folder / name).mkdir()
                await world.start(name)
            yield world
        finally:
            for agent in world.agents.values():
                await agent.terminate()


async def faults(world, progress, draw):
    """Every fault before any comes again, most of them two at a time."""
    ends, told = time.monotonic() + SOAK_SECONDS, []
    while time.monotonic() < ends or set(told) != set(FAULTS):
        left = draw.sample(sorted(FAULTS), len(FAULTS))
        while left and (time.monotonic() < ends or set(told) != set(FAULTS)):
            pair = [left.pop()]
            if left and not {pair[0], left[-1]} & ALONE:
                pair.append(left.pop())
            undo = [await FAULTS[name](world, draw) for name in pair]
            await progress.after(LASTS, f"while {pair} after {told[-4:]}")
            for end in reversed(undo):
                if end is not None:
                    await end()
            told += pair
            await progress.after(LASTS, f"after {told[-4:]}")
    return told


async def at_rest(agent):
    """All is given back, and all tiers answer."""
    async with asyncio.timeout(DEADLINE):
        while True:
            stats = await agent.stats()
            slots = stats["slots"]
            problems = [tier.get("problem") for tier in stats["tiers"].values() if tier.get("problem")]
            busy = stats["leases"] or stats["pending_loads"] or slots["quarantine"] or slots["reserved"]
            if not problems and not busy:
                return stats


async def test_faults_in_turn_under_load_break_no_request_and_no_byte(tmp_path, capsys):
    draw, progress = random.Random(11), Progress()
    async with world_of(tmp_path) as world:
        engines = [
            Engine(agent.socket, world.up[name], number * 10 + part, progress)
            for number, (name, agent) in enumerate(world.agents.items())
            for part in range(ENGINES)
        ]
        world.engines = [engine.die for engine in engines]
        running = [asyncio.create_task(engine.run()) for engine in engines]
        chaos = asyncio.create_task(faults(world, progress, draw))
        await asyncio.wait([*running, chaos], return_when=asyncio.FIRST_COMPLETED)
        told = await chaos if chaos.done() else []
        for task in running:
            assert not task.done(), f"an engine has ended: {task.exception()!r}"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for engine in engines:
            await engine.die()
        for agent in world.agents.values():
            stats = await at_rest(agent)
            assert (await agent.get("/healthz"))[0] == 200
            with capsys.disabled():
                print(stats["tier_counters"], stats["counters"])
            await agent.terminate()
            whole(agent.arena)
    with capsys.disabled():
        print(f"{progress.requests} requests, {progress.broken} of killed agents, {progress.hits}, {told}")
    assert set(told) == set(FAULTS)
    assert all(progress.hits[tier] for tier in TIERS), "a tier was never hit"
