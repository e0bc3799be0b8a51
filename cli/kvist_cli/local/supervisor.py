"""All programs of one cluster: order of starting and stopping, state.json, flush, arenas.

Runs in one event loop; cluster.py is the blocking front for other threads.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvist_cli.local.agents import flush_agents, remove_arena
from kvist_cli.local.events import Event, EventKind, OnEvent
from kvist_cli.local.identity import Identity, identify
from kvist_cli.local.keeper import ClusterError, Keeper
from kvist_cli.local.options import Options
from kvist_cli.local.state import VERSION, ClusterState, RunFolder
from kvist_operator.plan import Role
from kvist_operator.render.local import Process

_AGAIN_SECONDS: Final = 5.0
STOP_ORDER: Final = ((Role.ROUTER,), (Role.ENGINE,))


class Supervisor:
    """Owns the children. Only one per run folder: the caller holds the folder's lock."""

    def __init__(
        self,
        name: str,
        model: str,
        processes: Sequence[Process],
        folder: RunFolder,
        options: Options,
        environment: Mapping[str, str],
        on_event: OnEvent,
    ) -> None:
        self._name = name
        self._model = model
        self._folder = folder
        self._options = options
        self._on_event = on_event
        self._own = _this_process()
        self._later: asyncio.TimerHandle | None = None  # the state could not be written
        self._admin = next((p for p in processes if p.role is Role.ROUTER), None)
        self.keepers = {
            process.name: Keeper(process, environment, options, self._emit, self._write)
            for process in processes
        }

    async def up(self) -> None:
        """Start everything in order; raises ClusterError when a program does not get healthy."""
        for keeper in self.keepers.values():
            put_aside(keeper.process.log)
        self._write()
        tasks = [asyncio.create_task(self._start(keeper)) for keeper in self.keepers.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def kill(self, name: str) -> int:
        """See Cluster.kill."""
        return await self.keeper(name).kill()

    async def restart(self, name: str) -> None:
        """Stop, start, wait until healthy."""
        keeper = self.keeper(name)
        await keeper.stop()
        keeper.start()
        await keeper.ready()

    async def ready(self, name: str) -> float:
        """Wait until healthy; the seconds its start took."""
        keeper = self.keeper(name)
        await keeper.ready()
        return keeper.start_seconds

    async def down(self, *, flush: bool, keep_arenas: bool) -> None:
        """Router, engines, flush, agents; then the arenas."""
        for roles in STOP_ORDER:
            await self._stop(roles)
        agents = [k for k in self.keepers.values() if k.process.role is Role.AGENT]
        if flush:
            urls = {k.process.name: k.process.url for k in agents if k.identity is not None}
            await flush_agents(urls, self._options.flush_deadline, self._emit)
        await self._stop((Role.AGENT,))
        for keeper in agents:
            if keeper.process.arena is not None and not keep_arenas:
                remove_arena(keeper.process.arena)
        self._written()
        self._folder.forget()

    def abort(self) -> None:
        """SIGKILL to everything, without waiting."""
        for keeper in self.keepers.values():
            keeper.kill_now()

    def keeper(self, name: str) -> Keeper:
        """By program name; raises ClusterError naming the programs there are."""
        if name not in self.keepers:
            raise ClusterError(f"no program {name!r}; there are {', '.join(self.keepers)}")
        return self.keepers[name]

    async def _start(self, keeper: Keeper) -> None:
        for name in keeper.process.after:
            await self.keepers[name].ready()
        keeper.start()
        await keeper.ready()

    async def _stop(self, roles: tuple[Role, ...]) -> None:
        await asyncio.gather(*(k.stop() for k in self.keepers.values() if k.process.role in roles))

    def _emit(self, event: Event) -> None:
        # A closed terminal or pipe at the listener's end is no reason to stop supervising.
        with suppress(OSError):
            self._on_event(event)

    def _write(self) -> None:
        state = ClusterState(
            version=VERSION,
            name=self._name,
            model=self._model,
            supervisor=self._own,
            programs=tuple(keeper.state() for keeper in self.keepers.values()),
            admin_url=_admin_url(self._admin),
        )
        try:
            self._folder.write(state)
        except OSError as error:
            if self._later is None:  # once until it can be written again
                self._emit(Event(EventKind.NOTE, "", f"state cannot be written: {error}"))
            else:
                self._later.cancel()
            # `kvist status` reads it: the next change may be days away.
            self._later = asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._write)
        else:
            self._written()

    def _written(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None


def put_aside(log: Path) -> None:
    """The log of the run before is kept once, so that logs do not grow over runs."""
    if log.exists():
        log.replace(log.with_suffix(".previous.log"))


def _admin_url(router: Process | None) -> str:
    return (
        f"http://127.0.0.1:{router.ports['router-admin']}"
        if router and "router-admin" in router.ports
        else ""
    )


def _this_process() -> Identity:
    return identify(os.getpid()) or Identity(pid=os.getpid(), start=0, boot="")
