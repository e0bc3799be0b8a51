"""The mind over a Unix socket: `MindServer` beside the mind, `MindClient` in a relay.

Frames of kvist_connector.protocol.framing. Questions carry a number and are answered in any order;
reports have no answer. When a relay's connection ends, what it had in flight is cancelled; when
the mind's ends, open questions are refused with 503 and the next one connects anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import count
from pathlib import Path

import msgspec

from kvist_connector.protocol.framing import FrameDecoder, FrameError, encode
from kvist_router.mind.interface import Decision, Metadata, Mind, Refusal, Report

READ_BYTES = 2**18
MAX_OPEN = 4096  # questions of one connection that wait for an answer
GONE = Refusal(
    503, "the router's mind cannot be reached", "service_unavailable", code="no_mind", retry_after=1
)


class _Question(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    body: bytes
    metadata: Metadata


class _Told(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    report: Report


class _Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    answer: Decision | Refusal


class MindServer:
    """Serves a mind to relays."""

    def __init__(self, mind: Mind, path: Path) -> None:
        self._mind = mind
        self._path = path
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; replaces the socket of an earlier process."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, self._path)

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder: FrameDecoder[_Question | _Told] = FrameDecoder(_Question | _Told)
        running: set[str] = set()
        try:
            async with asyncio.TaskGroup() as group:
                while data := await reader.read(READ_BYTES):
                    for message in decoder.feed(data):
                        if isinstance(message, _Question):
                            group.create_task(self._answer(message, writer, running))
                        else:
                            await self._told(message, running)
        except* (FrameError, OSError):
            pass  # a broken relay: its connection ends, and what it had in flight below
        finally:
            writer.close()
            for request_id in running:
                await self._mind.report(request_id, Report("cancelled", error="the relay is gone"))

    async def _answer(self, question: _Question, writer: asyncio.StreamWriter, running: set[str]) -> None:
        answer = await self._mind.decide(question.body, question.metadata)
        if isinstance(answer, Decision):
            running.add(answer.id)
        if not writer.is_closing():
            writer.write(encode(_Answer(question.number, answer)))

    async def _told(self, told: _Told, running: set[str]) -> None:
        if told.report.event in ("ended", "cancelled", "failed"):
            running.discard(told.request_id)
        await self._mind.report(told.request_id, told.report)


class MindClient:
    """`interface.Mind` in a relay. `connect_seconds` bounds connecting; the relay bounds decisions."""

    def __init__(self, path: Path, connect_seconds: float = 2.0) -> None:
        self._path = path
        self._seconds = connect_seconds
        self._numbers = count()
        self._open: dict[int, asyncio.Future[Decision | Refusal]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def decide(self, body: bytes, metadata: Metadata) -> Decision | Refusal:
        """See interface.Mind."""
        if len(self._open) >= MAX_OPEN or not await self._connected():
            return GONE
        assert self._writer is not None
        number = next(self._numbers)
        future: asyncio.Future[Decision | Refusal] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        try:
            self._writer.write(encode(_Question(number, body, metadata)))
            return await future
        finally:
            del self._open[number]

    async def report(self, request_id: str, report: Report) -> None:
        """See interface.Mind; never waits. A mind that is gone has forgotten the request anyway."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(_Told(request_id, report)))

    async def close(self) -> None:
        """End the connection."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _connected(self) -> bool:
        async with self._connecting:
            if self._writer is not None:
                return True
            try:
                async with asyncio.timeout(self._seconds):
                    reader, self._writer = await asyncio.open_unix_connection(self._path)
            except (OSError, TimeoutError):
                return False
            self._reading = asyncio.create_task(self._read(reader, self._writer))
            return True

    async def _answered(self, message: _Answer) -> None:
        future = self._open.get(message.number)
        if future is not None and not future.done():
            future.set_result(message.answer)
        elif isinstance(message.answer, Decision):  # its client left meanwhile
            await self.report(message.answer.id, Report("cancelled"))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder: FrameDecoder[_Answer] = FrameDecoder(_Answer)
        try:
            with contextlib.suppress(FrameError, OSError):
                while data := await reader.read(READ_BYTES):
                    for message in decoder.feed(data):
                        await self._answered(message)
        finally:
            writer.close()
            self._writer = None
            for future in self._open.values():
                if not future.done():
                    future.set_result(GONE)
