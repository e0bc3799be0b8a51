"""A whole agent in this process: its own stores, socket and HTTP API, without a process to start.

For tests that break what lies below an agent and look at its books afterwards. The log is the
test's own, since it is this process's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import ClientTimeout
from aiohttp.test_utils import TestClient, TestServer

from kvist_connector.agent.access import Access
from kvist_connector.agent.agent import Agent
from kvist_connector.agent.parts import Parts
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.protocol.engine import Layout
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.fake_engine import FakeEngine, prompt_keys
from kvist_connector.testing.patience import patient

DEADLINE = 60.0
_THREADS = 2


class WholeAgent:
    """`start`, and `stop` when it is over; `engine` is one that is connected to it."""

    def __init__(
        self,
        agent: Agent,
        parts: Parts,
        socket: Path,
        client: TestClient[Any, Any],
        threads: ThreadPoolExecutor,
    ) -> None:
        self._agent = agent
        self.socket = socket
        self.folder = socket.parent
        self._client = client
        self._threads = threads
        self._stopped = False
        self.parts = parts
        self.engine: FakeEngine

    @classmethod
    async def start(cls, folder: Path, offered: Layout | None = None, **settings: Any) -> WholeAgent:
        """`settings` are those of AgentSettings beside names and places, which are in the folder; limits not
        named are long.

        `offered`: the layout of the engine that is connected.
        """
        values = {"replica": "test", "socket": folder / "s", "arena": folder / "arena", "memory": 1 << 20}
        threads = ThreadPoolExecutor(_THREADS)
        given = AgentSettings(**patient(values | settings))
        agent = Agent(given, threads, Access(None, None))
        agent.claim()
        # Started before the agent, as the program does: closing it late would wait for feed readers.
        client = TestClient(
            TestServer(agent.application()), timeout=ClientTimeout(total=DEADLINE), raise_for_status=True
        )
        await client.start_server()
        try:
            await agent.start()
        except BaseException:
            await client.close()
            await agent.close()
            threads.shutdown()
            raise
        assert agent.parts is not None
        whole = cls(agent, agent.parts, given.socket, client, threads)
        whole.engine = await FakeEngine.start(given.socket, offered)
        return whole

    @property
    def running(self) -> bool:
        """Until it is stopped."""
        return not self._stopped

    async def new_engine(self) -> None:
        """The engine ends, and another one connects."""
        await self.engine.stop()
        self.engine = await FakeEngine.start(self.socket)

    async def stats(self) -> dict[str, Any]:
        """The stats document."""
        async with self._client.get("/v1/kvist/stats") as response:
            found: dict[str, Any] = await response.json()
            return found

    async def metric(self, name: str, **labels: str) -> float | None:
        """One figure of /metrics; None when it is not there."""
        inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        wanted = f"{name}{{{inside}}} " if labels else f"{name} "
        async with self._client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return next((float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted)), None)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A control."""
        async with self._client.post(f"/v1/kvist/{path}", json=body) as response:
            found: dict[str, Any] = await response.json()
            return found

    async def until_answers(self, tier: Tier, answers: bool) -> None:
        """Wait until the metrics say that a lower tier has no problem, or that it has one."""
        async with asyncio.timeout(DEADLINE):
            while await self.metric("kvist_agent_tier_answers", tier=tier.label) != float(answers):
                pass  # each look is a request that waits for its answer

    async def computed(self, keys: Sequence[bytes], start: int = 0) -> None:
        """As when a prompt ran: its chunks are stored, and found in memory."""
        await self.engine.store(keys, start)
        assert len(await self.found(keys, memory=True)) == len(keys), "what was computed is not in memory"

    async def written(self) -> None:
        """Everything is in the lower tiers."""
        assert await self.parts.writebehind.flush(DEADLINE), "tiers are lost, or too slow"

    async def found(self, keys: Sequence[bytes], memory: bool = False) -> list[Tier]:
        """Where the leading chunks of a prompt came from; their bytes are right. `memory`: it may help."""
        if not memory:
            await self.post("clear", {"tier": "memory"})
        answer = await self.engine.lookup(keys)
        assert self.engine.holds(keys, answer), "wrong bytes"
        return [Tier(number) for number in answer.tiers]

    async def check(self) -> None:
        """Books agree, nothing is leased or lost, no task has died."""
        async with asyncio.timeout(DEADLINE):
            while left := _left_over(await self.stats()):
                # Slots of an engine that has gone come back when its lock on the arena is looked at.
                assert left == "quarantine", left
        self.parts.memory.check_integrity()
        assert not self._agent.supervisor.failed

    async def stop(self) -> None:
        """As a signal to end; safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        await self.engine.stop()
        await self._agent.drain()
        self._agent.end_streams()
        await self._client.close()
        await self._agent.close()
        self._threads.shutdown()


def _left_over(stats: Mapping[str, Any]) -> str:
    """What should be free and is not; empty when all is well."""
    slots = stats["slots"]
    if stats["leases"] or stats["pending_loads"]:
        return f"{stats['leases']} leases, {stats['pending_loads']} loads are left"
    if slots["reserved"] != stats["granted"]:
        return f"{slots['reserved']} slots are reserved and {stats['granted']} of them granted"
    return "quarantine" if slots["quarantine"] else ""


def keys_of(chunks: int, first: int = 0) -> list[bytes]:
    """Keys of the first chunks of the prompt that begins with the token `first`."""
    return prompt_keys(range(first, first + 8 * chunks))
