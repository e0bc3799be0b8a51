"""An engine without an engine: scheduler half and workers that speak to a real agent.

Workers write recognisable bytes into real slots with the checks that the protocol asks for.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvist_connector.arena.geometry import slot_bytes, slot_offset
from kvist_connector.arena.headers import Headers, State
from kvist_connector.arena.locks import MemberLock
from kvist_connector.keys import chunk_keys, root_key
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.framing import FrameDecoder, encode

M = TypeVar("M", bound=wire.Message)
DEADLINE_SECONDS = 20.0


def layout(fingerprint: bytes = b"f" * 32, **changes: Any) -> wire.Layout:
    """A small layout: 4 layers of 4 KiB, chunks of 8 tokens in blocks of 4."""
    values: dict[str, Any] = {
        "fingerprint": fingerprint,
        "group": 0,
        "ranks": 1,
        "layers": 4,
        "layer_bytes": 4096,
        "blocks": 2,
        "chunk_tokens": 8,
        "block_tokens": 4,
        "model": "fake",
        "description": {"dtype": "bytes"},
    }
    return wire.Layout(**(values | changes))


def prompt_keys(tokens: Sequence[int], fingerprint: bytes = b"f" * 32, chunk_tokens: int = 8) -> list[bytes]:
    """Keys of the chunks of a prompt under `layout()`."""
    return chunk_keys(root_key(fingerprint), tokens, chunk_tokens)


def content(key: bytes, rank: int, size: int) -> bytes:
    """What a worker writes for a chunk: different for every key and rank."""
    return (key + bytes([rank])).ljust(32, b"\xa5") * (size // 32)


class Connection:
    """One connection; received messages wait until somebody asks for their type."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: FrameDecoder[wire.Message] = FrameDecoder(wire.ToEngine)
        self._inbox: list[wire.Message] = []
        self._news = asyncio.Event()
        self.closed = asyncio.Event()
        self._task = asyncio.create_task(self._receive())

    @classmethod
    async def open(cls, path: Path, hello: wire.Hello) -> Connection:
        """Connect and say hello."""
        connection = cls(*await asyncio.open_unix_connection(str(path)))
        connection.send(hello)
        return connection

    def send(self, message: wire.Message) -> None:
        """Queue a message."""
        self._writer.write(encode(message))

    async def expect(self, kind: type[M], match: Callable[[M], bool] = lambda message: True) -> M:
        """The next message of this kind that matches; others stay queued."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                for message in self._inbox:
                    if isinstance(message, kind) and match(message):
                        self._inbox.remove(message)
                        return message
                if self.closed.is_set():
                    raise ConnectionError(f"connection closed while waiting for {kind.__name__}")
                self._news.clear()
                await self._news.wait()

    def received(self, kind: type[M]) -> list[M]:
        """Take everything of this kind that is here already."""
        found = [message for message in self._inbox if isinstance(message, kind)]
        self._inbox = [message for message in self._inbox if not isinstance(message, kind)]
        return found

    async def close(self) -> None:
        """Disconnect."""
        self._writer.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    async def _receive(self) -> None:
        try:
            while data := await self._reader.read(65536):
                self._inbox.extend(self._decoder.feed(data))
                self._news.set()
        except ConnectionError:
            pass
        finally:
            self.closed.set()
            self._news.set()


class FakeWorker:
    """A worker half: registers a layout, maps the arena, fills and reads slots."""

    def __init__(self, connection: Connection, member: str, rank: int) -> None:
        self.connection = connection
        self.member = member
        self.rank = rank
        self.arena: wire.Arena | None = None
        self._lock: MemberLock | None = None
        self._mapping: mmap.mmap | None = None

    @classmethod
    async def connect(
        cls, socket: Path, engine: str, rank: int, offered: wire.Layout, member: str = ""
    ) -> FakeWorker:
        """Register and map; raises PermissionError with the agent's words when refused."""
        member = member or f"w{rank}-{uuid.uuid4().hex[:8]}"
        hello = wire.Hello(
            protocol=1, role="worker", engine=engine, member=member, rank=rank, pid=os.getpid()
        )
        worker = cls(await Connection.open(socket, hello), member, rank)
        worker.connection.send(wire.Register(layout=offered))
        await worker.connection.expect(wire.Welcome)
        answer: wire.Message = await worker.connection.expect(
            wire.Message, lambda message: isinstance(message, wire.Arena | wire.Refused)
        )
        if isinstance(answer, wire.Refused):
            await worker.connection.close()
            raise PermissionError(answer.reason)
        assert isinstance(answer, wire.Arena)
        worker.map(answer)
        return worker

    def map(self, arena: wire.Arena) -> None:
        """Take the member lock and map the file."""
        self.arena = arena
        if not arena.path:
            return
        if self._lock is None:
            self._lock = MemberLock(Path(arena.path), self.member)
        fd = os.open(arena.path, os.O_RDWR)
        try:
            self._mapping = mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def fill(self, ref: wire.SlotRef, data: bytes) -> bool:
        """Write a slot as the protocol says; false when the slot is not ours (any more)."""
        headers, start, size = self._where(ref)
        if not headers.holds(ref.slot, ref.generation, State.RESERVED):
            return False
        assert self._mapping is not None
        self._mapping[start : start + size] = data[:size]
        return headers.holds(ref.slot, ref.generation, State.RESERVED)

    def read(self, ref: wire.SlotRef) -> bytes | None:
        """The slot's bytes; None when the reference is stale."""
        headers, start, size = self._where(ref)
        if not headers.holds(ref.slot, ref.generation, State.COMMITTED):
            return None
        assert self._mapping is not None
        data = self._mapping[start : start + size]
        return data if headers.holds(ref.slot, ref.generation, State.COMMITTED) else None

    @property
    def slot_size(self) -> int:
        """Bytes of one slot of one rank."""
        assert self.arena is not None
        return slot_bytes(self.arena.geometry)

    def die(self) -> None:
        """Lose lock and mapping, as a killed process does; the connection is closed apart."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    async def close(self) -> None:
        """Disconnect and unmap."""
        await self.connection.close()
        self.die()

    def _where(self, ref: wire.SlotRef) -> tuple[Headers, int, int]:
        assert self.arena is not None
        assert self._mapping is not None
        geometry = self.arena.geometry
        headers = Headers(self._mapping, geometry.slots)
        return headers, slot_offset(geometry, self.rank, ref.slot), slot_bytes(geometry)


class FakeEngine:
    """Scheduler half and workers of one engine."""

    def __init__(self, scheduler: Connection, workers: list[FakeWorker]) -> None:
        self.scheduler = scheduler
        self.workers = workers
        self.granted: list[wire.SlotRef] = []

    @classmethod
    async def start(cls, socket: Path, offered: wire.Layout | None = None, engine: str = "") -> FakeEngine:
        """Workers first, as in vLLM, then the scheduler half."""
        offered = offered or layout()
        engine = engine or uuid.uuid4().hex
        workers = [await FakeWorker.connect(socket, engine, rank, offered) for rank in range(offered.ranks)]
        return cls(await cls.connect_scheduler(socket, engine), workers)

    @staticmethod
    async def connect_scheduler(socket: Path, engine: str) -> Connection:
        """Only the scheduler half's connection, welcomed."""
        hello = wire.Hello(
            protocol=1, role="scheduler", engine=engine, member=f"s-{engine}", rank=0, pid=os.getpid()
        )
        connection = await Connection.open(socket, hello)
        await connection.expect(wire.Welcome)
        return connection

    async def grant(self, count: int = 1) -> list[wire.SlotRef]:
        """Take granted slots, waiting for more when these do not suffice."""
        while len(self.granted) < count:
            self.granted.extend((await self.scheduler.expect(wire.Grant)).refs)
        taken, self.granted = self.granted[:count], self.granted[count:]
        return taken

    async def store(
        self,
        keys: Sequence[bytes],
        start: int = 0,
        root: bytes = bytes(16),
        tags: tuple[str, ...] = (),
        epoch: int = 0,
    ) -> None:
        """Fill and commit chunks start.. of a chain whose keys are given from the first, as grants allow."""
        while start < len(keys):
            self.granted += [ref for grant in self.scheduler.received(wire.Grant) for ref in grant.refs]
            count = min(len(keys) - start, max(1, len(self.granted)))
            for commit in self._filled(keys, start, await self.grant(count), root):
                tagged = msgspec.structs.replace(commit, tags=tags, epoch=epoch)
                self.scheduler.send(wire.Step(commits=(tagged,)))
            start += count

    def _filled(
        self, keys: Sequence[bytes], start: int, refs: Sequence[wire.SlotRef], root: bytes
    ) -> list[wire.Commit]:
        commits = []
        for index, ref in enumerate(refs, start):
            for worker in self.workers:
                assert worker.fill(ref, content(keys[index], worker.rank, worker.slot_size))
            parent = keys[index - 1] if index else root
            commits.append(wire.Commit(ref=ref, key=keys[index], parent=parent, index=index))
        return commits

    async def lookup(self, keys: Sequence[bytes], request: str = "r", release: bool = True) -> wire.Answer:
        """The final answer of a lookup."""
        tokens = 8 * len(keys)
        self.scheduler.send(wire.Lookup(request=request, keys=b"".join(keys), tokens=tokens))
        answer = await self.scheduler.expect(
            wire.Answer, lambda message: message.request == request and not message.pending
        )
        if release:
            self.scheduler.send(wire.Step(releases=(request,)))
        return answer

    def holds(self, keys: Sequence[bytes], answer: wire.Answer) -> bool:
        """Whether every rank reads the right bytes through every reference of the answer."""
        return all(
            worker.read(ref) == content(key, worker.rank, worker.slot_size)
            for key, ref in zip(keys, answer.refs, strict=False)
            for worker in self.workers
        )

    async def stop(self) -> None:
        """Everything disconnects and unmaps."""
        await self.scheduler.close()
        for worker in self.workers:
            await worker.close()
