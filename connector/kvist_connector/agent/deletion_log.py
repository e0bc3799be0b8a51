"""What was given up on an own tier and may not be deleted yet: `<arena>.deletions`, keys of 16 bytes.

A key is noted before its object is deleted and the file is emptied when no deletion is left, so that
what was cleared does not come back with the next agent, whatever hindered the deletion: a kill, a
disk that hangs or cannot be written to. The file lies beside the arena, since that is no part of
the disk that fails. A noted key that was stored again since costs that chunk, never a wrong one.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvist_connector.keys import KEY_BYTES

log = logging.getLogger(__name__)
_MOST_BYTES: Final = 1 << 20


class DeletionLog:
    """Nothing is opened before the first call."""

    def __init__(self, arena: Path) -> None:
        self.path = arena.with_name(f"{arena.name}.deletions")
        self._size = 0
        self.left_out = 0

    def read(self) -> list[bytes]:
        """What an earlier agent was still to delete; a torn last record is none."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("%s cannot be read (%s): what was cleared may come back", self.path, error.strerror)
            return []
        whole = len(data) - len(data) % KEY_BYTES
        return [data[start : start + KEY_BYTES] for start in range(0, whole, KEY_BYTES)]

    def keep(self, keys: Iterable[bytes]) -> None:
        """These and no others are to be deleted; a crash leaves the old or the new list."""
        data = b"".join(keys)
        try:
            if data:
                temporary = self.path.with_name(self.path.name + ".partial")
                temporary.write_bytes(data)
                temporary.replace(self.path)
            else:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            self._count_left_out(error)
        self._size = len(data)

    def add(self, key: bytes) -> None:
        """Called before the object is deleted."""
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                if os.write(fd, key) != len(key):
                    # What follows a torn key would be read as others.
                    os.ftruncate(fd, os.fstat(fd).st_size // KEY_BYTES * KEY_BYTES)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(fd)
        except OSError as error:
            self._count_left_out(error)
        self._size += len(key)

    @property
    def due(self) -> bool:
        """Whether it has grown so long that `keep` pays."""
        return self._size > _MOST_BYTES

    @property
    def empty(self) -> bool:
        """Whether nothing has been noted since it was emptied."""
        return not self._size

    def _count_left_out(self, error: OSError) -> None:
        if not self.left_out:
            log.warning(
                "%s: %s: what is cleared now may come back after a restart (further ones are only counted)",
                self.path,
                error.strerror,
            )
        self.left_out += 1
