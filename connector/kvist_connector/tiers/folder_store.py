"""Chunks as files in a folder that several machines have mounted. Called by `agent.shared_stores`.

Object stores replace under a condition; a file system has none. Here whoever replaces or deletes holds the
lock of one file meanwhile (flock: the kernel gives it back when its holder dies). Readers and those who put
what is not there need none: a file is written beside its place and takes it at once, whole.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

import obstore
from obstore.store import LocalStore

from kvist_connector.tiers.base import Buffer
from kvist_connector.tiers.object_store import ObjectStore, path_of

log = logging.getLogger(__name__)

_LOCK: Final = ".replacing"  # no chunk's name
_PAUSE: Final = 0.002  # seconds; a change holds the lock for as long as a chunk takes to be written
# How file systems say that they have no locks.
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class FolderStore(ObjectStore):
    """See module."""

    def __init__(self, backend: LocalStore, label: str, threads: Executor) -> None:
        super().__init__(backend, label, threads)
        self._lock = Path(backend.prefix or "/") / _LOCK
        self._locks = True

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore."""
        path, body = path_of(key), await self._joined(parts)

        def work() -> bool:
            head = obstore.get(self._backend, path, options={"range": (0, len(seen))}).bytes()
            if bytes(head) != seen:
                return False
            obstore.put(self._backend, path, body, use_multipart=False)
            return True

        return await self._alone(work)

    async def delete(self, key: bytes) -> bool:
        """See ChunkStore. A file that somebody is replacing must not come back by that."""
        path = path_of(key)

        def work() -> bool:
            obstore.delete(self._backend, path)
            return True

        return await self._alone(work)

    async def _alone(self, work: Callable[[], bool]) -> bool:
        """Nobody else replaces or deletes meanwhile; false where there is no such file, or no folder."""
        loop = asyncio.get_running_loop()
        with self._in_words():
            # The caller has a deadline. No thread waits for a lock: who gives up would leave it behind.
            while True:
                done = await loop.run_in_executor(self._threads, self._locked, work)
                if done is not None:
                    return done
                await asyncio.sleep(_PAUSE)

    def _locked(self, work: Callable[[], bool]) -> bool | None:
        """None when another one has the lock."""
        try:
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._take(fd)
                return work()
            finally:
                os.close(fd)
        except BlockingIOError:
            return None
        except FileNotFoundError:
            return False

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if self._locks:
                log.warning(
                    "%s: its file system has no locks (%s): tags that agents add at once may be lost",
                    self._label,
                    error.strerror,
                )
            self._locks = False
