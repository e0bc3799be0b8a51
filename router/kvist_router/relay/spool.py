"""Long bodies in files without names: written as they come, read as engines take them. Called by body.py.

The files are in the folder for temporary files (`TMPDIR`) and are gone with the process. Reading and writing
run in threads; one whose request was cancelled may still be at it when the file is closed, hence the lock.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Final

from kvist_router.relay.skim import Range

PIECE_BYTES: Final = 2**18
_WRITE_BYTES: Final = 2**20


class Spool:
    """One body. Raises OSError where the disk does."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `close` is the end of its life
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._waiting_size = self._written = 0

    async def write(self, piece: bytes) -> None:
        """The next bytes."""
        self._waiting.append(piece)
        self._waiting_size += len(piece)
        if self._waiting_size >= _WRITE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """What was written can be read."""
        data, at = b"".join(self._waiting), self._written
        self._waiting.clear()
        self._waiting_size = 0
        self._written += len(data)
        if data:
            await asyncio.to_thread(self._put, data, at)

    async def read(self, begin: int, end: int) -> bytes:
        """All bytes of a range."""
        return await asyncio.to_thread(self._get, begin, end - begin)

    def close(self) -> None:
        """The bytes are of no use any more."""
        with self._lock:
            self._file.close()

    def _put(self, data: bytes, at: int) -> None:
        with self._lock:
            rest = memoryview(data)
            while rest and not self._file.closed:
                count = os.pwrite(self._file.fileno(), rest, at)
                rest, at = rest[count:], at + count

    def _get(self, begin: int, size: int) -> bytes:
        with self._lock:
            data = b"" if self._file.closed else os.pread(self._file.fileno(), size, begin)
        if len(data) != size:
            raise OSError(f"{len(data)} of {size} bytes are left of a body")
        return data


class Streamed:
    """A body that is in a spool for the most part; `len` is that of the whole."""

    def __init__(self, spool: Spool, parts: Sequence[bytes | Range]) -> None:
        self._spool = spool
        self._parts = parts

    def __len__(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part[1] - part[0] for part in self._parts)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """In pieces of a bounded size; may be begun again."""
        for part in self._parts:
            if isinstance(part, bytes):
                yield part
                continue
            for begin in range(part[0], part[1], PIECE_BYTES):
                yield await self._spool.read(begin, min(begin + PIECE_BYTES, part[1]))
