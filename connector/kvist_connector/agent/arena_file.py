"""The arena file: reserved and touched before anyone hears of it, locked by one agent.

`reserve` runs in a thread at start (touching gigabytes takes seconds); `format` when the first
worker registered. A sparse file on a full tmpfs would be a SIGBUS in the engine, so a file that
does not fit is refused here, in words.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import BinaryIO, cast

from kvist_connector.agent.limits import available_memory
from kvist_connector.arena.geometry import (
    HEADER_BYTES,
    MAGIC,
    PAGE,
    chunk_bytes,
    file_bytes,
    header_offset,
    pack_superblock,
    slot_bytes,
    slot_offset,
    unpack_superblock,
)
from kvist_connector.arena.headers import Headers
from kvist_connector.arena.locks import living_members
from kvist_connector.errors import ConfigError, UnsupportedError
from kvist_connector.protocol.engine import Geometry
from kvist_connector.quantity import format_bytes

_BLANK = bytes(PAGE)


class ArenaFile:
    """An arena of a fixed number of bytes, mapped by this process."""

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap) -> None:
        self.path = path
        self._fd = fd
        self._mapping = mapping
        self._view = memoryview(mapping)
        self.size = len(mapping)

    @classmethod
    def reserve(cls, path: Path, size: int) -> ArenaFile:
        """Lock, allocate and touch `size` bytes; raises ConfigError when that cannot be."""
        size = (size + PAGE - 1) // PAGE * PAGE
        fd = _open_locked(path)
        try:
            _refuse_foreign(path, fd)
            _refuse_resize(path, fd, size)
            _refuse_overcommit(path, fd, size)
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            # MAP_POPULATE faults every page in now, so the pages are charged to the agent.
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"memory: arena {path} cannot be reserved: {error.strerror}") from error
        except ConfigError:
            os.close(fd)
            raise
        return cls(path, fd, mapping)

    def existing(self) -> tuple[Geometry, bytes, int] | None:
        """Geometry, fingerprint and epoch that an earlier agent left, when they fit this file."""
        try:
            geometry, fingerprint, epoch = unpack_superblock(bytes(self._view[:PAGE]))
        except UnsupportedError:
            return None
        if min(geometry.slots, geometry.ranks, geometry.layers, geometry.layer_bytes) <= 0:
            return None
        return (geometry, fingerprint, epoch) if file_bytes(geometry) <= self.size else None

    def erase(self, geometry: Geometry) -> None:
        """Invalidate the superblock and blank the headers; `seal` follows when they are written."""
        self._view[:PAGE] = _BLANK
        end = header_offset(geometry.slots)
        for start in range(PAGE, end, PAGE):
            stop = min(start + PAGE, end)
            self._view[start:stop] = _BLANK[: stop - start]

    def seal(self, geometry: Geometry, fingerprint: bytes, epoch: int) -> None:
        """Write the superblock, last: from here on the file says what it holds."""
        packed = pack_superblock(geometry, fingerprint, epoch)
        self._view[: len(packed)] = packed

    def headers(self, geometry: Geometry) -> Headers:
        """The slot headers of the mapping."""
        if header_offset(geometry.slots - 1) + HEADER_BYTES > self.size:
            raise ValueError("the geometry does not fit the arena")
        return Headers(self._mapping, geometry.slots)

    def chunk_views(self, geometry: Geometry, slot: int) -> list[memoryview]:
        """The bytes of a slot, one view a rank."""
        length = slot_bytes(geometry)
        starts = [slot_offset(geometry, rank, slot) for rank in range(geometry.ranks)]
        return [self._view[start : start + length] for start in starts]

    def reader(self) -> BinaryIO:
        """The file again, for sending parts of it; to be closed by whoever asked."""
        return cast(BinaryIO, os.fdopen(os.dup(self._fd), "rb", buffering=0))

    def give_up(self) -> None:
        """Release the lock only, as the end of a process does; views handed out may still exist."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release mapping and lock; the file stays. Views handed out must be gone."""
        self._view.release()
        self._mapping.close()
        os.close(self._fd)


def describe_minimum(geometry: Geometry, size: int) -> str:
    """Why an arena of `size` bytes holds no slot of this geometry."""
    return (
        f"memory: {format_bytes(size)} is smaller than one chunk of this model "
        f"({format_bytes(chunk_bytes(geometry))}): raise memory, or set it to 0 for index only"
    )


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"arena: {path} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigError(
            f"arena: {path} is used by another agent: stop it or choose another path"
        ) from error
    return fd


def _refuse_foreign(path: Path, fd: int) -> None:
    """Somebody's file is not to be overwritten because its path was given by mistake.

    Nor is one to be used that another user has put into a folder for all: who owns it reads and writes KV.
    """
    for found in (path, *(each for each in path.parent.iterdir() if each.name.startswith(f"{path.name}."))):
        owner = found.lstat().st_uid
        if owner not in (os.geteuid(), 0):
            raise ConfigError(
                f"arena: {found} belongs to another user ({owner}): remove it or give another path"
            )
    start = os.pread(fd, len(MAGIC), 0)
    if start.strip(b"\0") and start != MAGIC:
        raise ConfigError(f"arena: {path} exists and is no arena: remove it or give another path")


def _refuse_resize(path: Path, fd: int, size: int) -> None:
    present = os.fstat(fd).st_size
    if present in (0, size):
        return
    living = living_members(path)
    if living:
        raise ConfigError(
            f"memory: {format_bytes(size)} differs from the {format_bytes(present)} of {path}, which "
            f"{len(living)} engine worker(s) still map: stop the engine first, or keep the size"
        )


def _refuse_overcommit(path: Path, fd: int, size: int) -> None:
    needed = size - min(os.fstat(fd).st_blocks * 512, size)
    filesystem = os.fstatvfs(fd)
    free = filesystem.f_bavail * filesystem.f_frsize
    if needed > free:
        raise ConfigError(
            f"memory: the arena needs {format_bytes(needed)} more, {path.parent} has "
            f"{format_bytes(free)} free: lower memory or free space there"
        )
    available = available_memory()
    if available is not None and needed > available:
        raise ConfigError(
            f"memory: the arena needs {format_bytes(needed)} more, this process may take "
            f"{format_bytes(available)} (memory of the machine or its control group): lower memory"
        )
