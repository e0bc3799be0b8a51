"""Questions and answers between the keeper and a child, over a pair of sockets. Both sides ask.

    keeper -> child    Begin (the child builds itself and serves), Use (other settings), Pulse, End
    child  -> keeper   Scrape (metrics of all processes)

The pair ends when either process does, however it ends; that is how a child knows that its keeper is gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Literal

import msgspec

from kvist_connector.protocol.framing import FrameDecoder, FrameError, encode
from kvist_router.mind.interface import View
from kvist_router.processes.family import Family

READ_BYTES = 2**18
MAX_OPEN = 64  # questions of one side that wait for an answer

# `stopping`: say so, take requests still; `close`: take no more, running answers may end; `now`: end them.
Step = Literal["stopping", "close", "now"]


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Build and serve with these settings (JSON); `mind` is the path of the mind's socket.

    `view`: what a relay goes by until the mind tells it more.
    """

    settings: bytes
    mind: str
    view: View | None = None


class Use(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Other settings (JSON) from now on."""

    settings: bytes


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Say that you are alive, and your metrics."""


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The next step towards the end."""

    step: Step


class Scrape(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The metrics of all processes, in Prometheus' text form."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It is so."""


class Wrong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The settings cannot be used; nothing has changed."""

    problem: str


class Metrics(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of one process; `view`: what a relay was told last."""

    families: list[Family]
    view: View | None = None


class Text(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of all processes."""

    text: bytes


Question = Begin | Use | Pulse | End | Scrape
Answer = Done | Wrong | Metrics | Text


class _Asked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    question: Question


class _Answered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    answer: Answer


_log = logging.getLogger(__name__)


class GoneError(ConnectionError):
    """The other side is gone, or cannot be understood."""


class Channel:
    """One side. `answer` answers what the other side asks; `run` reads until the other side is gone."""

    def __init__(self, answer: Callable[[Question], Awaitable[Answer]]) -> None:
        self._answer = answer
        self._numbers = count()
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def ask(self, question: Question, seconds: float) -> Answer:
        """The other side's answer; raises GoneError, TimeoutError."""
        if self._writer is None or self._writer.is_closing() or len(self._open) >= MAX_OPEN:
            raise GoneError("the other process is gone")
        number = next(self._numbers)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        try:
            self._writer.write(encode(_Asked(number, question)))
            async with asyncio.timeout(seconds):
                return await future
        finally:
            del self._open[number]

    async def open(self, connection: socket.socket) -> None:
        """Take this end of the pair."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=connection)

    async def run(self) -> None:
        """Read and answer; returns when the other side is gone."""
        reader, writer = self._reader, self._writer
        if reader is None or writer is None:
            raise GoneError("the channel was not opened")
        decoder: FrameDecoder[_Asked | _Answered] = FrameDecoder(_Asked | _Answered)
        try:
            while data := await reader.read(READ_BYTES):
                for message in decoder.feed(data):
                    self._take(message)
        except (OSError, FrameError) as error:
            _log.debug("a channel ends: %s", error)
        finally:
            writer.close()
            for future in self._open.values():
                if not future.done():
                    future.set_exception(GoneError("the other process is gone"))
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)

    def _take(self, message: _Asked | _Answered) -> None:
        if isinstance(message, _Answered):
            future = self._open.get(message.number)
            if future is not None and not future.done():
                future.set_result(message.answer)
            return
        if len(self._answering) >= MAX_OPEN:
            raise FrameError(f"more than {MAX_OPEN} open questions")
        task = asyncio.create_task(self._reply(message))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _reply(self, asked: _Asked) -> None:
        answer = await self._answer(asked.question)
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(_Answered(asked.number, answer)))
