"""What runs in a process of the keeper's: the mind or a relay. Called by processes/__main__.py.

Signals are the keeper's: a terminal sends them to all processes at once, but the steps of an end are one
after the other. When the keeper is gone, however it went, a child ends at once and with it what it relays:
it sees that the channel ends, and where it hangs or is stopped the kernel kills it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from kvist_connector.errors import ConfigError
from kvist_router.logs import configure
from kvist_router.memory import settle_memory
from kvist_router.processes.channel import (
    Answer,
    Begin,
    Channel,
    Done,
    End,
    Metrics,
    Pulse,
    Question,
    Scrape,
    Step,
    Text,
    Use,
    Wrong,
)
from kvist_router.processes.family import families_of
from kvist_router.processes.sides import Inherited, Side, Sockets
from kvist_router.server import Servers
from kvist_router.settings import RouterSettings

SCRAPE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ORPHANED = 70  # exit status of a child whose keeper is gone


def main(arguments: Sequence[str]) -> int:
    """ROLE and file descriptors; returns the exit status."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    role, *inherited = arguments
    control, listener, *more = [socket.socket(fileno=int(number)) for number in inherited]
    for item in (control, listener, *more):
        item.setblocking(False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Child(role, Sockets(control, listener, more[0] if more else None)).run())


class Child:
    """One process' life."""

    def __init__(self, role: str, sockets: Sockets) -> None:
        self._role = role
        self._sockets = sockets
        self._channel = Channel(self._answer)
        self._registry = CollectorRegistry()
        self._begin: asyncio.Future[Begin]
        self._started: asyncio.Future[str]  # what is wrong; empty when nothing is
        self._side: Side | None = None

    async def run(self) -> int:
        """From Begin to the last step of End."""
        loop = asyncio.get_running_loop()
        self._begin, self._started = loop.create_future(), loop.create_future()
        await self._channel.open(self._sockets.control)
        reading = asyncio.create_task(self._channel.run())
        serving = asyncio.create_task(self._serve())
        await asyncio.wait({reading, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            os._exit(ORPHANED)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await serving
        return 0

    async def _serve(self) -> None:
        begin = await self._begin
        settings = RouterSettings.model_validate_json(begin.settings)
        configure(settings.log_level, settings.log)
        logging.getLogger(Servers.__module__).setLevel(logging.WARNING)  # its steps are the keeper's to tell
        build = importlib.import_module(f"kvist_router.processes.{self._role}").build
        inherited = Inherited(self._sockets, self._registry, self._exposition, Path(begin.mind), begin.view)
        try:
            async with build(settings, inherited) as side:
                self._side = side
                self._started.set_result("")
                settle_memory()
                await side.servers.run()
        except ConfigError as error:
            self._started.set_result(str(error))
            await asyncio.Event().wait()  # the keeper ends us when it has heard

    async def _answer(self, question: Question) -> Answer:
        match question:
            case Begin():
                self._begin.set_result(question)
                problem = await self._started
                return Wrong(problem) if problem else Done()
            case Pulse():
                view = None if self._side is None else self._side.view()
                return Metrics(families_of(self._registry), view)
            case Use():
                return await self._use(question)
            case End():
                if self._side is not None:
                    _end(self._side.servers, question.step)
        return Done()

    async def _use(self, question: Use) -> Answer:
        assert self._side is not None  # the keeper asks no child that has not begun
        try:
            await self._side.use(RouterSettings.model_validate_json(question.settings))
        except ConfigError as error:
            return Wrong(str(error))
        return Done()

    async def _exposition(self) -> bytes:
        answer = await self._channel.ask(Scrape(), SCRAPE_SECONDS)
        assert isinstance(answer, Text)  # the keeper's answer to this question
        return answer.text


def _end(servers: Servers, step: Step) -> None:
    if step == "stopping":
        servers.announce()
    else:
        servers.close()
