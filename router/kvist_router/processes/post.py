"""A place for one child process, which is started, watched and replaced. Called by keeper.py."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from kvist_connector.errors import ConfigError
from kvist_router.mind.interface import View
from kvist_router.pauses import Pauses
from kvist_router.processes.channel import (
    Answer,
    Begin,
    Channel,
    Done,
    End,
    GoneError,
    Metrics,
    Pulse,
    Question,
    Step,
    Wrong,
)
from kvist_router.processes.family import Family

START_SECONDS = 180.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
LONG_LIFE = 30.0  # seconds after which an end is not taken for a fault of the start
_log = logging.getLogger(__name__)


class Post:
    """`name` is for the log, `sockets` and the descriptors `more` are inherited, `begin` gives the settings
    of the moment.

    `left` hears what a process counted before it ended. `serves` is set while a process serves, `vacant` from
    the end of one that was not told to until the next one serves.
    """

    def __init__(
        self,
        role: str,
        name: str,
        sockets: Sequence[socket.socket],
        more: Sequence[int],
        begin: Callable[[], Begin],
        answer: Callable[[Question], Awaitable[Answer]],
        left: Callable[[list[Family]], None],
        random: Random,
    ) -> None:
        self.role, self.name = role, name
        self.restarts = 0
        self.serves, self.vacant = asyncio.Event(), asyncio.Event()
        self._sockets, self._more = sockets, more
        self._begin = begin
        self._answer = answer
        self._left = left
        self._pauses = Pauses(FIRST_PAUSE, LONGEST_PAUSE, random)
        self._families: list[Family] = []
        self.view: View | None = None  # the last that it, or one before it, was told
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ending = False

    @property
    def up(self) -> bool:
        """Whether a process serves."""
        return self.serves.is_set()

    @property
    def pid(self) -> int | None:
        """Of the process that is there."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start a process; returns when it serves. Raises ConfigError, GoneError, TimeoutError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        inherited = [theirs.fileno(), *(item.fileno() for item in self._sockets)]
        command = [sys.executable, "-m", "kvist_router.processes", self.role, *map(str, inherited)]
        try:
            self._process = await asyncio.create_subprocess_exec(*command, pass_fds=[*inherited, *self._more])
        finally:
            theirs.close()
        self._channel = Channel(self._answer)
        await self._channel.open(ours)
        self._reading = asyncio.create_task(self._channel.run())
        answer = await self._channel.ask(self._begin(), START_SECONDS)
        if isinstance(answer, Wrong):
            raise ConfigError(answer.problem)
        self.vacant.clear()
        self.serves.set()

    async def keep(self) -> None:
        """Replace the process whenever it ends, until it was told to."""
        while True:
            began = time.monotonic()
            status = await self._ended()
            if self._ending:
                return
            self.vacant.set()
            if time.monotonic() - began > LONG_LIFE:
                self._pauses.anew()
            pause = self._pauses.next()
            _log.error("process %s ended with status %d; the next starts in %.2g s", self.name, status, pause)
            self.restarts += 1
            await asyncio.sleep(pause)
            if self._ending:
                return
            try:
                await self.start()
                if self._ending:  # nobody told the new one
                    self.kill()
            except (ConfigError, GoneError, TimeoutError, OSError) as error:
                _log.error("process %s did not start: %s", self.name, error or "no answer in time")
                self.kill()

    async def pulse(self, seconds: float) -> list[Family]:
        """Its metrics of now, or the last ones when it does not answer in time."""
        with contextlib.suppress(TimeoutError):
            await self._pulse(seconds)
        return self._families

    async def watch(self, hung_seconds: float, every: float) -> None:
        """Kill the process when it gives no answer, for ever."""
        while True:
            await asyncio.sleep(every)
            try:
                await self._pulse(hung_seconds)
            except TimeoutError:
                _log.error("process %s gave no answer for %g s: it is killed", self.name, hung_seconds)
                self.kill()

    async def tell(self, question: Question, seconds: float) -> Answer:
        """Its answer; `Done` of one that is not there, which is told anew when it starts."""
        if not self.up or self._channel is None:
            return Done()
        try:
            return await self._channel.ask(question, seconds)
        except GoneError:
            return Done()
        except TimeoutError:
            return Wrong(f"process {self.name} gave no answer in time")

    async def end(self, step: Step, seconds: float) -> None:
        """One step of the end; from `close` on nobody takes its place."""
        self._ending = self._ending or step != "stopping"
        await self.tell(End(step), seconds)

    async def gone(self, seconds: float) -> None:
        """Returns when the process has ended; it is killed after so many seconds."""
        if self._process is None:
            return
        self._ending = True
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            _log.warning("process %s has not ended in time: it is killed", self.name)
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Kill it, if it is there still, and give back what it took here."""
        self._ending = True
        self.kill()
        if self._process is not None:
            await self._process.wait()
        await self._stop_reading()

    async def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _pulse(self, seconds: float) -> None:
        """Take its metrics; raises TimeoutError."""
        if not self.up or self._channel is None:
            return
        with contextlib.suppress(GoneError):  # `keep` sees to it
            answer = await self._channel.ask(Pulse(), seconds)
            if isinstance(answer, Metrics) and self.up:
                self._families, self.view = answer.families, answer.view or self.view

    async def _ended(self) -> int:
        assert self._process is not None  # it was started
        status = await self._process.wait()
        self.serves.clear()
        await self._stop_reading()
        self._left(self._families)
        self._families = []
        return status
