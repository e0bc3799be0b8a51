"""The folder of a disk tier, locked for one agent for as long as it runs. Called by disk.py, in threads.

The lock is that of a file in it, so it is worth nothing once somebody has removed or replaced the
folder: two agents could write there. A folder that was removed is made and locked anew. Another file
system in its place is not used: a volume that is not mounted would fill the disk below it, and come back
with what is retired meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from kvist_connector.errors import ConfigError, TierError
from kvist_connector.tiers.direct import is_possible

_LOCK = ".lock"


class DiskFolder:
    """Made by `take`."""

    def __init__(self, root: Path, lock: int) -> None:
        self.root = root
        self._lock = lock
        self._turn = threading.Lock()

    @classmethod
    def take(cls, root: Path, direct: bool) -> DiskFolder:
        """Make and lock it; raises ConfigError."""
        try:
            lock = _locked(root)
        except BlockingIOError as error:
            raise ConfigError(f"disk.path: {root} is used by another agent: choose another folder") from error
        except OSError as error:
            raise ConfigError(
                f"disk.path: {root} cannot be locked: {error.strerror}: use a writable local disk"
            ) from error
        if direct and not is_possible(root):
            os.close(lock)
            raise ConfigError(
                f"disk.direct: the file system of {root} has no direct I/O: leave it off, or use a local disk"
            )
        return cls(root, lock)

    def hold(self) -> None:
        """Returns when the folder is there and ours; raises OSError, TierError."""
        if self._is_ours():
            return
        with self._turn:
            if self._lock >= 0 and not self._is_ours():
                self._take_again()

    def close(self) -> None:
        """Another agent may take it."""
        with self._turn:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _is_ours(self) -> bool:
        try:
            there = os.stat(self.root / _LOCK)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._lock))

    def _take_again(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if os.stat(self.root).st_dev != os.fstat(self._lock).st_dev:
            raise TierError(
                f"{self.root} is another file system than at the start: mount that one, or restart the agent"
            )
        try:
            lock = _locked(self.root)
        except BlockingIOError as error:
            raise TierError(f"{self.root} was replaced and is used by another agent") from error
        os.close(self._lock)
        self._lock = lock


def _locked(root: Path) -> int:
    root.mkdir(parents=True, exist_ok=True)
    lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
