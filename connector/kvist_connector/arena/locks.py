"""A worker's life, visible to the agent without a connection.

A worker holds an exclusive flock on `<arena>.members/<member>` for as long as it has
the arena mapped. The kernel drops it when the process dies, however it dies. The agent
asks with a non-blocking attempt; also after its own restart, when all connections are gone.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_ACQUIRE_SECONDS = 5.0
_RETRY_SECONDS = 0.001


def members_folder(arena_path: Path) -> Path:
    """Folder of lock files beside the arena."""
    return arena_path.with_name(arena_path.name + ".members")


class MemberLock:
    """Held by a worker; `close()` or death releases it."""

    def __init__(self, arena_path: Path, member: str) -> None:
        if not member or "/" in member or member.startswith("."):
            raise ValueError(f"member id {member!r} cannot be a file name")
        folder = members_folder(arena_path)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / member
        self._fd = _acquire(self.path)

    def close(self) -> None:
        """Release and remove the file; safe to call twice."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _acquire(path: Path) -> int:
    """A descriptor that holds the lock of the file that is at `path`; raises BlockingIOError when held.

    The agent may ask in the moment between our open and our lock: it then holds the lock for an
    instant, takes us for dead and removes the file. So a lock counts only while the path still leads to it.
    """
    deadline = time.monotonic() + _ACQUIRE_SECONDS
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _leads_to(path, fd):
                return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise
            time.sleep(_RETRY_SECONDS)
        os.close(fd)


def _leads_to(path: Path, fd: int) -> bool:
    """Whether the path still is the open file."""
    try:
        return path.stat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def member_alive(arena_path: Path, member: str) -> bool:
    """Whether the member still holds its lock. Removes the file of a dead one."""
    path = members_folder(arena_path) / member
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        if _leads_to(path, fd):
            path.unlink(missing_ok=True)
            return False
    finally:
        os.close(fd)
    return member_alive(arena_path, member)  # replaced since we opened it: ask the new one


def living_members(arena_path: Path) -> set[str]:
    """Every member whose lock is held now."""
    folder = members_folder(arena_path)
    if not folder.is_dir():
        return set()
    return {entry.name for entry in folder.iterdir() if member_alive(arena_path, entry.name)}
