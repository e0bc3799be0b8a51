"""Chunks as files in a folder that one agent owns.

A file is written under a temporary name and renamed, so it is there whole or not at all;
whether its bytes survive a power cut is the fsync policy, and the envelope's checksum
catches it when they did not. The folder is scanned at start, so the limit holds across
restarts; one that was removed meanwhile is made anew (disk_folder.py). Blocking calls run in the
given threads. Reads and writes go through the page cache, or past it where that is asked for and
chunks are whole pages.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.tiers.base import (
    Buffer,
    Capabilities,
    Capacity,
    ChunkStore,
    Item,
    Read,
    Sealed,
    total_bytes,
)
from kvist_connector.tiers.direct import ALIGNMENT, aligned
from kvist_connector.tiers.disk_folder import DiskFolder

log = logging.getLogger(__name__)

_SUFFIX = ".kvist"
_PARTIAL = ".partial"
# Hashed while it is in a core's cache; in a page cache, pieces that end at such multiples are faster.
_PIECE_BYTES = 1024 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    """One file as it was written or found; the next under its name is another one."""

    size: int


class DiskStore(ChunkStore):
    """Made by `DiskStore.open`."""

    def __init__(
        self,
        folder: DiskFolder,
        limit: int,
        fsync: Literal["none", "data"],
        threads: Executor,
        direct: bool = False,
    ) -> None:
        self._folder = folder
        self._root = folder.root
        self._limit = limit
        self._fsync = fsync == "data"
        self._threads = threads
        self._owned = False
        self._direct = direct
        self._files: dict[bytes, _File] = {}
        self._coming: dict[bytes, int] = {}  # sizes of writes in flight: they count against the limit
        self._used = 0

    @classmethod
    async def open(
        cls,
        root: Path,
        limit: int,
        fsync: Literal["none", "data"],
        threads: Executor,
        owned: bool = False,
        direct: bool = False,
    ) -> DiskStore:
        """Take the folder and learn what is in it; raises ConfigError when another agent has it.

        `owned`: the threads end with the store. `direct`: past the page cache, ConfigError where the file
        system cannot do that.
        """
        loop = asyncio.get_running_loop()
        folder = await loop.run_in_executor(threads, DiskFolder.take, root, direct)
        store = cls(folder, limit, fsync, threads, direct)
        store._owned = owned
        store._files = await loop.run_in_executor(threads, _scan, root)
        store._used = sum(file.size for file in store._files.values())
        return store

    @property
    def capabilities(self) -> Capabilities:
        """One agent's own files."""
        return Capabilities(persistent=True, shared=False, listable=True, seals=True)

    async def probe(self) -> None:
        """See ChunkStore: whether the folder is ours still."""
        await self._run(self._folder.hold)

    async def get(self, read: Read) -> int | None:
        """See ChunkStore."""
        file = self._files.get(read.key)
        size = await self._run(lambda: _read(self._path(read.key), read, self._direct))
        # Somebody else removed it. A file that came meanwhile is another one.
        if size is None and file is not None and self._files.get(read.key) is file:
            self._forget(read.key)
        return size

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore; raises StorageFull above the limit or when the disk is full."""
        if key in self._files or key in self._coming:
            return False
        size = total_bytes(parts)
        if self._used + size > self._limit:
            raise StorageFull(f"{self._root} holds {self._used} bytes of at most {self._limit}")
        self._coming[key] = size
        self._used += size
        try:
            await self._run(lambda: self._write(self._path(key), parts))
        except BaseException:
            self._used -= size
            raise
        finally:
            del self._coming[key]
        self._files[key] = _File(size)
        return True

    async def delete(self, key: bytes) -> bool:
        """See ChunkStore."""
        if key not in self._files:
            return False
        await self._run(lambda: self._path(key).unlink(missing_ok=True))
        self._forget(key)
        return True

    async def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """See ChunkStore."""
        for key, file in list(self._files.items()):
            if key.startswith(prefix):
                yield Item(key, file.size)

    async def capacity(self) -> Capacity:
        """See ChunkStore."""
        return Capacity(self._used, self._limit)

    async def close(self) -> None:
        """Another agent may take the folder from now on."""
        self._folder.close()
        if self._owned:
            self._threads.shutdown(wait=False)

    def _write(self, path: Path, parts: Sequence[Buffer]) -> None:
        self._folder.hold()
        _write(path, parts, self._fsync, self._direct)

    def _forget(self, key: bytes) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            self._used -= file.size

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._root / name[:2] / (name + _SUFFIX)

    async def _run(self, work: Callable[[], R]) -> R:
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The thread cannot be stopped, and the buffers are the caller's again when we return.
            while not future.done():
                await asyncio.wait([future])
            raise
        except OSError as error:
            if error.errno in _FULL:
                raise StorageFull(f"{self._root}: {error.strerror}") from error
            raise TierError(f"{self._root}: {error.strerror}") from error


def _scan(root: Path) -> dict[bytes, _File]:
    files = {}
    refused = None
    # A link leads to what is not ours: files there are neither counted nor deleted.
    folders = [folder for folder in root.glob("??") if not folder.is_symlink()]
    for path in chain.from_iterable(folder.glob("*") for folder in folders):
        try:
            if path.name.endswith(_PARTIAL):
                path.unlink(missing_ok=True)
            elif path.name.endswith(_SUFFIX):
                key, status = _key_of(path), path.lstat()
                # What is no file is not ours, and opening a pipe would wait for ever.
                if key is not None and stat.S_ISREG(status.st_mode):
                    files[key] = _File(status.st_size)
        except OSError as error:
            refused = error
    if refused is not None:
        log.warning("disk tier: what cannot be read or deleted in %s stays there: %s", root, refused)
    return files


def _key_of(path: Path) -> bytes | None:
    try:
        key = bytes.fromhex(path.name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    return key if len(key) == 16 and path.parent.name == path.name[:2] else None


def _read(path: Path, read: Read, direct: bool) -> int | None:
    wanted = [view.cast("B") for view in read.into if view.nbytes]
    past = aligned(wanted) if direct else None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if past else 0))
    except FileNotFoundError:
        return None
    try:
        left = past.views if past else wanted
        position = 0
        while left:
            # From the disk itself all at once, from the page cache in pieces that stay in a core's cache.
            piece = left if past or read.seen is None else _first(left, _PIECE_BYTES)
            count = os.preadv(fd, piece, position)
            position += count
            if read.seen is not None:
                for view in _first(piece, count):
                    read.seen(view)
            # Direct reads are of whole pages but for the file's end.
            if count == 0 or (past and count % ALIGNMENT):
                break
            left = _advance(left, count)
        if past:
            past.copy_back()
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _write(path: Path, parts: Sequence[Buffer], sync: bool, direct: bool = False) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
    past = aligned(parts) if direct else None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if past else 0)
    try:
        fd = os.open(temporary, flags, 0o600)
        try:
            if past is None and isinstance(parts, Sealed):
                _write_sealed(fd, parts)
            else:
                _write_all(fd, past.views if past else [memoryview(part).cast("B") for part in parts])
            if sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_sealed(fd: int, parts: Sealed) -> None:
    """The body from where the head ends, each piece after it was seen: it is in a core's cache then."""
    position = os.lseek(fd, parts.head_bytes, os.SEEK_SET)
    left = parts.body
    while left:
        pieces = _first(left, _PIECE_BYTES - position % _PIECE_BYTES)
        for piece in pieces:
            parts.see(piece)
        _write_all(fd, pieces)
        size = total_bytes(pieces)
        position += size
        left = _advance(left, size)
    os.lseek(fd, 0, os.SEEK_SET)
    _write_all(fd, [memoryview(parts.head)])


def _write_all(fd: int, views: Sequence[memoryview]) -> None:
    left = [view for view in views if view.nbytes]
    while left:
        left = _advance(left, os.writev(fd, left))


def _first(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """The first `count` bytes of the views, or all of them."""
    found = []
    for view in views:
        if count <= 0:
            break
        found.append(view[:count])
        count -= view.nbytes
    return found


def _advance(views: list[memoryview], count: int) -> list[memoryview]:
    """The views after `count` bytes were moved: both readv and writev may stop early."""
    for number, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[number + 1 :]] if count else views[number:]
        count -= view.nbytes
    return []
