"""One agent's life: claim, start, drain, close. Built by `agent.app`, which owns process and ports."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor
from dataclasses import replace

from aiohttp import web

from kvist_connector.agent.access import Access
from kvist_connector.agent.arena_file import ArenaFile
from kvist_connector.agent.engine_server import EngineServer
from kvist_connector.agent.http import Api, Status
from kvist_connector.agent.learned_file import LearnedFile
from kvist_connector.agent.metrics import Metrics
from kvist_connector.agent.parts import Opened, Parts, build
from kvist_connector.agent.peer_api import PeerApi
from kvist_connector.agent.peer_stores import Peers
from kvist_connector.agent.retired_file import RetiredFile
from kvist_connector.agent.roster import Roster
from kvist_connector.agent.session import Session
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.agent.shelf import ArenaShelf
from kvist_connector.agent.stores import open_stores
from kvist_connector.agent.supervise import Supervisor
from kvist_connector.tls import LiveContext

log = logging.getLogger(__name__)


class Agent:
    """`parts` exist after `start`."""

    def __init__(self, settings: AgentSettings, threads: Executor, access: Access) -> None:
        self._settings = settings
        self._threads = threads
        self.supervisor = Supervisor()
        self.parts: Parts | None = None
        self._arena: ArenaFile | None = None
        self._not_ready = "the arena is being reserved"
        self._metrics = Metrics()
        status = Status(lambda: self.supervisor.failed, lambda: self.supervisor.failed or self._not_ready)
        self._api = Api(status, self._metrics.exposition, access)
        self._access = access
        self.shelf: ArenaShelf | None = None
        self._server = EngineServer(settings.socket, self._session)
        self._idle: asyncio.TimerHandle | None = None
        self._learned = LearnedFile(settings.arena)

    def claim(self) -> None:
        """Refuse a second agent on this socket before anything is touched."""
        self._server.claim()

    def application(self) -> web.Application:
        """The HTTP API; before `start` is done it answers that it is not ready."""
        return self._api.application()

    def peer_application(self) -> web.Application:
        """What other agents may ask; once, after `start`."""
        parts, peer = self.parts, self._settings.peer
        assert parts is not None, "the peer port opens after the parts are built"
        file = parts.memory.reader()
        self.shelf = ArenaShelf(parts.core, parts.busy, self._threads, file)
        handover, counts = parts.controls.handover, parts.core.counts
        access = replace(self._access, certificates=self._settings.tls.used)
        api = PeerApi(self.shelf, access, peer.reads, peer.deadline, take=handover.given, counts=counts)
        handover.settled = api.settled
        application = api.application()

        async def close(_: web.Application) -> None:
            file.close()

        application.on_cleanup.append(close)
        return application

    def peer_port(self, port: int) -> None:
        """The peer application listens there."""
        assert self.parts is not None, "the peer port opens after the parts are built"
        self.parts.controls.handover.port = port

    async def start(self) -> None:
        """Take arena and lower tiers, adopt what they hold, accept engines."""
        loop = asyncio.get_running_loop()
        if self._settings.memory:
            self._arena = await loop.run_in_executor(
                self._threads, ArenaFile.reserve, self._settings.arena, self._settings.memory
            )
        tls = LiveContext("client", self._settings.tls, "tls") if self._settings.tls.used else None
        peers = Peers(self._settings.peer, Roster(self._settings.peer), self._access.admin, tls)
        stores = await open_stores(self._settings, self._threads, self._metrics.meter, peers)
        now_ms = int(time.time() * 1000)
        file = RetiredFile(self._settings.arena, self._settings.disk.path, lambda: now_ms)
        retired = await loop.run_in_executor(self._threads, file.read)
        learned = await loop.run_in_executor(self._threads, self._learned.read)
        opened = Opened(self._arena, stores, retired, file, peers, learned)
        parts = build(self._settings, opened, self.supervisor, now_ms, self.connections_changed)
        self.parts = parts
        await self._adopt(parts)
        parts.writebehind.adopted()
        self._metrics.watch(parts)
        self.supervisor.daemon("write-behind", parts.writebehind.run())
        if parts.exclusive is not None:
            self.supervisor.daemon("placement", parts.exclusive.run())
        self.supervisor.daemon("eviction", self._learned.keep(parts.catalog.learned, self._threads))
        self.supervisor.daemon("peers", peers.roster.run())
        self.supervisor.daemon("loop stalls", self._metrics.sample_stalls())
        if parts.events is not None:
            self.supervisor.daemon("kv events", parts.events.run())
        self._api.ready(parts.controls, parts.feed)
        await self._server.start()
        self._not_ready = ""
        self.connections_changed()

    async def drain(self) -> None:
        """Before the end: what is committed reaches the lower tiers, as far as the deadline allows."""
        self._not_ready = "the agent is stopping"
        if self.parts is not None and not await self.parts.writebehind.flush(
            self._settings.shutdown_deadline
        ):
            log.warning("%d chunks were not written in time", self.parts.writebehind.pending_chunks)

    async def close(self) -> None:
        """Stop everything; arena, journal and disk files stay."""
        if self._idle is not None:
            self._idle.cancel()
        await self._server.close()
        await self.supervisor.close()
        if self.parts is not None:
            await self._close_parts(self.parts)
        if self._arena is not None:
            self._arena.give_up()

    async def _close_parts(self, parts: Parts) -> None:
        for lower in parts.lower.values():
            await lower.close()
        parts.pins.close()
        parts.members.close()
        parts.memory.close()
        self._learned.write(parts.catalog.learned())
        if parts.events is not None:
            parts.events.close()

    def end_streams(self) -> None:
        """Feed readers learn that this is the end; without it they would hold the HTTP server open."""
        if self.parts is not None:
            self.parts.feed.close()

    def connections_changed(self) -> None:
        """Start or stop counting down to `idle_exit`."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        parts = self.parts
        if self._settings.idle_exit and parts is not None and not parts.core.sessions:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._settings.idle_exit, self._leave)

    def _leave(self) -> None:
        log.info("no connection for %s s: leaving", self._settings.idle_exit)
        self.supervisor.stopping.set()

    def _session(self) -> Session:
        assert self.parts is not None, "the socket opens after the parts are built"
        return self.parts.session()

    async def _adopt(self, parts: Parts) -> None:
        kept = parts.memory.resume(parts.core.epoch, parts.members.living())
        for lower in parts.lower.values():
            await lower.scan()
        if parts.memory.layout is not None:
            parts.core.hooks.layout(parts.memory.layout)
        parts.members.settle()
        log.info(
            "kept %d chunks in memory, %s",
            kept,
            {tier.label: len(parts.catalog.index(tier)) for tier in parts.lower},
        )
