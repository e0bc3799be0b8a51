"""The mind over a Unix socket: `MindServer` beside the mind, `MindClient` in a relay.

    relay                                   mind
      |  <----  told(view)                   |   at once, and every BEAT_SECONDS: it is alive
      |  question(number, body) ---->        |
      |  given up(number)  ---->             |   the client left: nobody wants the answer
      |  <----  answer(number, decision)     |   in any order
      |  report(id, ..)  ---->               |   no answer

Frames of kvist_connector.protocol.framing. When a relay's connection ends, what it had in flight is
cancelled; when nothing comes from the mind for `silent_seconds`, all open questions are answered `GONE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec

from kvist_connector.protocol.framing import MAX_FRAME_BYTES, FrameDecoder, FrameError, encode
from kvist_router.mind.fallback import GONE
from kvist_router.mind.interface import Decision, Metadata, Mind, Refusal, Report, View
from kvist_router.relay.answers import INTERNAL

READ_BYTES = 2**18
MAX_OPEN = 65_536  # questions of one connection that wait for an answer; the mind refuses long before
MAX_BODY = MAX_FRAME_BYTES - 2**16  # beside it the frame holds metadata
FULL = MAX_FRAME_BYTES  # bytes that the mind has not taken yet; a question waits until they are fewer
MAX_UNREAD = 2**30  # then the other side counts as gone
BEAT_SECONDS = 0.5
CONNECT_SECONDS = 2.0
_TOO_MANY = Refusal(
    503, "too many requests wait already", "service_unavailable", code="overloaded", retry_after=1
)
_TOO_LONG = Refusal(413, f"the body is longer than the limit of {MAX_BODY} bytes", code="body_too_long")

_log = logging.getLogger(__name__)


class _Question(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    body: bytes
    metadata: Metadata


class _GivenUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class _Told(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    report: Report


class _Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    answer: Decision | Refusal


class _Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    view: View


_FromRelay = _Question | _GivenUp | _Told
_FromMind = _Answer | _Beat


class MindServer:
    """Serves a mind to relays; `view` is told to each."""

    def __init__(self, mind: Mind, view: Callable[[], View], beat_seconds: float = BEAT_SECONDS) -> None:
        self._mind = mind
        self._view = view
        self._beat_seconds = beat_seconds
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Serve a listening Unix socket: who bound it keeps it for the next mind."""
        self._server = await asyncio.start_unix_server(self._connected, sock=listener)

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = _Serving(self._mind, self._view, writer)
        task = asyncio.create_task(serving.run(reader, self._beat_seconds))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)


class _Serving:
    """One relay's connection."""

    def __init__(self, mind: Mind, view: Callable[[], View], writer: asyncio.StreamWriter) -> None:
        self._mind = mind
        self._view = view
        self._writer = writer
        self._running: set[str] = set()  # ids of its requests
        self._open: dict[int, asyncio.Task[None]] = {}

    async def run(self, reader: asyncio.StreamReader, beat_seconds: float) -> None:
        """Serve it to its end."""
        try:
            async with asyncio.TaskGroup() as group:
                beat = group.create_task(self._beats(beat_seconds))
                await self._read(reader, group)
                beat.cancel()
                for task in list(self._open.values()):
                    task.cancel()
        except* (FrameError, OSError):
            pass  # a broken relay: its connection ends, and what it had in flight below
        finally:
            self._writer.close()
            for request_id in self._running:
                await self._mind.report(request_id, Report("cancelled", error="the relay is gone"))

    async def _read(self, reader: asyncio.StreamReader, group: asyncio.TaskGroup) -> None:
        decoder: FrameDecoder[_FromRelay] = FrameDecoder(_FromRelay)
        while data := await reader.read(READ_BYTES):
            for message in decoder.feed(data):
                if isinstance(message, _Question):
                    if len(self._open) >= MAX_OPEN:
                        raise FrameError(f"more than {MAX_OPEN} open questions")
                    self._open[message.number] = group.create_task(self._answer(message))
                elif isinstance(message, _Told):
                    await self._told(message)
                elif (task := self._open.get(message.number)) is not None:
                    task.cancel()

    async def _beats(self, seconds: float) -> None:
        while True:
            self._send(_Beat(self._view()))
            await asyncio.sleep(seconds)

    async def _answer(self, question: _Question) -> None:
        try:
            answer = await self._decide(question)
            if isinstance(answer, Decision):
                self._running.add(answer.id)
            self._send(_Answer(question.number, answer))
        finally:
            del self._open[question.number]

    async def _decide(self, question: _Question) -> Decision | Refusal:
        try:
            return await self._mind.decide(question.body, question.metadata)
        except Exception:  # noqa: BLE001 - the boundary of a question: others of the relay go on
            _log.exception("a decision failed")
            return INTERNAL

    async def _told(self, told: _Told) -> None:
        if told.report.event in ("ended", "cancelled", "failed"):
            self._running.discard(told.request_id)
        await self._mind.report(told.request_id, told.report)

    def _send(self, message: _FromMind) -> None:
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD:
            raise FrameError("the relay does not read")
        self._writer.write(encode(message))


class MindClient:
    """`interface.Mind` in a relay; `follow` keeps it connected, `told` hears what the mind tells of itself.

    A mind that was silent for `silent_seconds` is gone, however alive its process looks.
    """

    def __init__(
        self, path: Path, told: Callable[[View], None] = lambda view: None, silent_seconds: float = 3.0
    ) -> None:
        self._path = path
        self._told = told
        self._silent_seconds = silent_seconds
        self._numbers = count()
        self._open: dict[int, asyncio.Future[Decision | Refusal]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._spoken = False  # the mind has, on this connection

    async def decide(self, body: bytes, metadata: Metadata) -> Decision | Refusal:
        """See interface.Mind; `GONE` when the mind is, or goes meanwhile."""
        if len(body) > MAX_BODY:
            return _TOO_LONG
        if len(self._open) >= MAX_OPEN:
            return _TOO_MANY
        if not self._spoken or not await self._has_room():
            return GONE
        number = next(self._numbers)
        future: asyncio.Future[Decision | Refusal] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        try:
            self._send(_Question(number, body, metadata))
            return await future
        finally:
            del self._open[number]
            if not future.done() or future.cancelled():
                self._send(_GivenUp(number))

    async def _has_room(self) -> bool:
        """Wait while much is unread; whether the mind is there still."""
        writer = self._writer
        if writer is not None and writer.transport.get_write_buffer_size() > FULL:
            with contextlib.suppress(OSError):
                await writer.drain()
        return self._writer is not None

    async def report(self, request_id: str, report: Report) -> None:
        """See interface.Mind; never waits. A mind that is gone has forgotten the request anyway."""
        self._send(_Told(request_id, report))

    async def follow(self) -> str:
        """Connect and read until the connection ends: why it did."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path)
            writer.transport.set_write_buffer_limits(FULL, FULL // 2)
            self._writer = writer
            await self._read(reader)
            return "the mind closed the connection"
        except TimeoutError:
            return f"the mind was silent for {self._silent_seconds:g} s"
        except (FrameError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._writer, self._spoken = None, False
            if writer is not None:
                writer.transport.abort()
            for future in self._open.values():
                if not future.done():
                    future.set_result(GONE)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder: FrameDecoder[_FromMind] = FrameDecoder(_FromMind)
        while True:
            async with asyncio.timeout(self._silent_seconds):
                data = await reader.read(READ_BYTES)
            if not data:
                return
            for message in decoder.feed(data):
                if isinstance(message, _Answer):
                    await self._answered(message)
                else:
                    self._told(message.view)
                    self._spoken = True

    async def _answered(self, message: _Answer) -> None:
        future = self._open.get(message.number)
        if future is not None and not future.done():
            future.set_result(message.answer)
        elif isinstance(message.answer, Decision):  # its client left meanwhile
            await self.report(message.answer.id, Report("cancelled"))

    def _send(self, message: _FromRelay) -> None:
        writer = self._writer
        if writer is None or writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > MAX_UNREAD:
            writer.transport.abort()  # `follow` ends and answers everybody who waits
            return
        writer.write(encode(message))
