"""A whole agent in this process with its peer port: for tests of agents that read from each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from kvist_connector.agent.access import Access
from kvist_connector.agent.agent import Agent
from kvist_connector.agent.parts import Parts
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.fake_engine import FakeEngine, prompt_keys
from kvist_connector.testing.patience import patient


class PeerAgent:
    """`start`, and `stop` when it is over. `url` is its peer port's, "" when it serves nobody; `api_url`
    that of its HTTP API, "" until `serve_api`."""

    def __init__(self, agent: Agent, threads: ThreadPoolExecutor, socket: Path) -> None:
        self.agent = agent
        self.socket = socket
        self.url = self.api_url = ""
        self._api: web.AppRunner | None = None
        self._threads = threads
        self._runner: web.AppRunner | None = None
        self.engines: list[FakeEngine] = []

    @classmethod
    async def start(cls, folder: Path, token: str = "", serves: bool = True, **settings: Any) -> PeerAgent:
        """`settings` beside names and places; what lookups and reads may take is generous."""
        os.mkdir(folder)
        names = {"replica": folder.name, "socket": folder / "s", "arena": folder / "arena"}
        peer = settings.pop("peer", {}) | ({"host": "127.0.0.1"} if serves else {})
        given = AgentSettings(**patient(names | {"memory": 1 << 20} | settings | {"peer": peer}))
        threads = ThreadPoolExecutor(2)
        agent = Agent(given, threads, Access((lambda: token) if token else None))
        agent.claim()
        await agent.start()
        found = cls(agent, threads, given.socket)
        if serves:
            await found.serve()
        return found

    @property
    def parts(self) -> Parts:
        """The agent's parts."""
        assert self.agent.parts is not None
        return self.agent.parts

    @property
    def counts(self) -> dict[str, int]:
        """Events of its peer tier."""
        return dict(self.parts.lower[Tier.PEER].counts)

    async def serve(self, port: int = 0) -> None:
        """Open the peer port."""
        self._runner = web.AppRunner(
            self.agent.peer_application(), access_log=None, handler_cancellation=True, shutdown_timeout=0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.agent.peer_port(self._runner.addresses[0][1])
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def serve_api(self) -> None:
        """Open the HTTP API, that a router asks."""
        self._api = web.AppRunner(self.agent.application(), access_log=None, shutdown_timeout=0)
        await self._api.setup()
        await web.TCPSite(self._api, "127.0.0.1", 0).start()
        self.api_url = f"http://127.0.0.1:{self._api.addresses[0][1]}"

    async def unserve(self) -> None:
        """Close the peer port, as when the agent is gone."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def engine(self, offered: wire.Layout | None = None) -> FakeEngine:
        """Connect an engine; it is disconnected at the end."""
        self.engines.append(await FakeEngine.start(self.socket, offered))
        return self.engines[-1]

    async def computed(self, keys: Sequence[bytes], **more: Any) -> FakeEngine:
        """An engine has stored the chunks."""
        engine = self.engines[-1] if self.engines else await self.engine()
        await engine.store(keys, **more)
        found = await engine.lookup(keys)
        assert len(found.refs) == len(keys)
        return engine

    async def check(self) -> None:
        """The books agree, nothing is leased, no task has died."""
        for engine in self.engines:
            await engine.lookup(prompt_keys(range(9999, 10007)), "settled")  # all messages before were taken
        self.parts.memory.check_integrity()
        self.parts.memory.settle_fresh()
        chunks = list(self.parts.catalog.chunks())
        assert not any(chunk.leases for chunk in chunks), "leases are left"
        assert self.parts.loader.pending == 0
        assert not self.agent.supervisor.failed

    async def stop(self) -> None:
        """End everything."""
        for engine in self.engines:
            await engine.stop()
        await self.unserve()
        self.agent.end_streams()
        if self._api is not None:
            await self._api.cleanup()
        await self.agent.close()
        self._threads.shutdown()


async def end(agents: Sequence[PeerAgent]) -> None:
    """All of them, their books in order; nobody is served first, so that none waits for another."""
    for agent in agents:
        await agent.unserve()
    for agent in agents:
        await agent.check()
        await agent.stop()
