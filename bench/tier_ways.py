"""Ways to move named chunks: ours through the envelope, and the plainest to the same files and servers.

Used by bench.tiers. A way hands back what it got as it comes from it: ours in the caller's buffer, a client
library's as its own bytes.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

import obstore
import xxhash
from obstore.store import ObjectStore as ObjectBackend
from redis.asyncio import Redis

from bench.raw_http import Download
from kvist_connector.tiers.base import Buffer
from kvist_connector.tiers.envelope import HEADER_BYTES, EnvelopeStore

FINGERPRINT = b"b" * 32
_PIECE_BYTES = 1024 * 1024  # as in the disk tier


class Way(ABC):
    """All calls on one loop; `name` has 16 bytes."""

    @abstractmethod
    async def put(self, name: bytes, data: memoryview) -> None:
        """Store it."""

    @abstractmethod
    async def get(self, name: bytes, into: memoryview) -> Buffer:
        """The bytes; `into` may be used for them."""

    @abstractmethod
    async def delete(self, name: bytes) -> None:
        """Remove it."""

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what it holds."""


class Kvist(Way):
    """A tier as an agent has it: header, checksum, breaker, metering."""

    def __init__(self, store: EnvelopeStore, fingerprint: bytes = FINGERPRINT) -> None:
        self._store = store
        self._fingerprint = fingerprint

    async def put(self, name: bytes, data: memoryview) -> None:
        """See Way."""
        await self._store.put_if_absent(
            [data], fingerprint=self._fingerprint, key=name, parent=bytes(16), index=0
        )

    async def get(self, name: bytes, into: memoryview) -> Buffer:
        """See Way."""
        if await self._store.get(self._fingerprint, name, [into]) is None:
            raise RuntimeError(f"{name.hex()} is not there")
        return into

    async def delete(self, name: bytes) -> None:
        """See Way."""
        await self._store.delete(self._fingerprint, name)

    async def close(self) -> None:
        """See Way."""
        await self._store.inner.close()


class Files(Way):
    """One write or read after another of whole files, in as many threads as the disk tier has.

    `checked`: each file has the xxh3 of its bytes at its end, taken piece by piece while they are in a core's
    cache: what a tier that serves no damaged byte cannot do without.
    """

    def __init__(self, folder: Path, direct: bool, threads: Executor, checked: bool = False) -> None:
        self._folder = folder
        self._checked = checked
        self._direct = os.O_DIRECT if direct else 0
        self._threads = threads

    async def put(self, name: bytes, data: memoryview) -> None:
        """See Way."""
        await self._run(self._write_checked if self._checked else self._write, name, data)

    async def get(self, name: bytes, into: memoryview) -> Buffer:
        """See Way."""
        await self._run(self._read_checked if self._checked else self._read, name, into)
        return into

    async def delete(self, name: bytes) -> None:
        """See Way."""
        (self._folder / name.hex()).unlink()

    def _write(self, name: bytes, data: memoryview) -> None:
        fd = os.open(self._folder / name.hex(), os.O_WRONLY | os.O_CREAT | self._direct, 0o600)
        try:
            position = 0
            while position < data.nbytes:
                position += os.write(fd, data[position:])
        finally:
            os.close(fd)

    def _read(self, name: bytes, into: memoryview) -> None:
        fd = os.open(self._folder / name.hex(), os.O_RDONLY | self._direct)
        try:
            position = 0
            while position < into.nbytes:
                position += os.preadv(fd, [into[position:]], position)
        finally:
            os.close(fd)

    def _write_checked(self, name: bytes, data: memoryview) -> None:
        digest = xxhash.xxh3_64()
        fd = os.open(self._folder / name.hex(), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            for piece in _pieces(data):
                digest.update(piece)
                os.write(fd, piece)
            os.write(fd, digest.digest())
        finally:
            os.close(fd)

    def _read_checked(self, name: bytes, into: memoryview) -> None:
        digest, end, position = xxhash.xxh3_64(), bytearray(8), 0
        fd = os.open(self._folder / name.hex(), os.O_RDONLY)
        try:
            for piece in _pieces(into):
                position += os.preadv(fd, [piece], position)
                digest.update(piece)
            os.preadv(fd, [end], position)
        finally:
            os.close(fd)
        if digest.digest() != end:
            raise RuntimeError(f"{name.hex()} is damaged")

    async def _run(self, work: Callable[[bytes, memoryview], None], name: bytes, view: memoryview) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, work, name, view)


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, view.nbytes, _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]


class RedisClient(Way):
    """redis-py as it is: SET and GET."""

    def __init__(self, url: str, connections: int) -> None:
        self._client = Redis.from_url(url, max_connections=connections)

    async def put(self, name: bytes, data: memoryview) -> None:
        """See Way."""
        await self._client.set(name, data, nx=True)

    async def get(self, name: bytes, into: memoryview) -> Buffer:
        """See Way."""
        found = await self._client.get(name)
        if not isinstance(found, bytes):
            raise RuntimeError(f"{name.hex()} is not there")
        return found

    async def delete(self, name: bytes) -> None:
        """See Way."""
        await self._client.unlink(name)

    async def close(self) -> None:
        """See Way."""
        await self._client.aclose()


class ObjectClient(Way):
    """obstore as it is: one PUT, one GET."""

    def __init__(self, backend: ObjectBackend) -> None:
        self._backend = backend

    async def put(self, name: bytes, data: memoryview) -> None:
        """See Way."""
        await obstore.put_async(self._backend, f"plain/{name.hex()}", data, use_multipart=False)

    async def get(self, name: bytes, into: memoryview) -> Buffer:
        """See Way."""
        found = await obstore.get_async(self._backend, f"plain/{name.hex()}")
        return memoryview(await found.bytes_async())

    async def delete(self, name: bytes) -> None:
        """See Way."""
        await obstore.delete_async(self._backend, f"plain/{name.hex()}")


class Downloads(Way):
    """Pieces of a file over kept connections, a thread each; a piece begins with a chunk's header."""

    def __init__(self, port: int, connections: int, threads: Executor, names: Sequence[bytes]) -> None:
        self._free = [Download(port) for _ in range(connections)]
        self._threads = threads
        self._numbers = {name: number for number, name in enumerate(names)}

    async def put(self, name: bytes, data: memoryview) -> None:
        """It is there."""

    async def get(self, name: bytes, into: memoryview) -> Buffer:
        """See Way."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._get, self._numbers[name], into)
        return into

    async def delete(self, name: bytes) -> None:
        """It stays."""

    async def close(self) -> None:
        """See Way."""
        for one in self._free:
            one.close()

    def _get(self, number: int, into: memoryview) -> None:
        one = self._free.pop()
        one.get(number, [memoryview(bytearray(HEADER_BYTES)), into])
        self._free.append(one)
