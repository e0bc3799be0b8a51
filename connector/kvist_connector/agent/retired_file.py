"""What an agent knows to be retired, in files that live as long as its tiers: beside the arena, on its disk.

Written before a retirement takes effect, so that no restart serves what was retired. A file that cannot
be read counts as if it retired everything stored so far.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvist_connector.errors import TierError
from kvist_connector.protocol.retired import Retired

log = logging.getLogger(__name__)
FILE = "retired.json"


class RetiredFile:
    """`now`: an epoch above all that can have been given out before, for files that cannot be read."""

    def __init__(self, arena: Path, disk: Path | None, now: Callable[[], int]) -> None:
        self._paths = [arena.with_name(f"{arena.name}.{FILE}")]
        self._paths += [disk / FILE] if disk is not None else []
        self._now = now

    def read(self) -> Retired:
        """What all files say together."""
        found = Retired()
        for path in self._paths:
            found = found.merge(self._read(path))
        return found

    def write(self, retired: Retired) -> None:
        """Replace every file, durably; a crash leaves the old or the new one of each. Raises TierError."""
        data = msgspec.json.encode(retired)
        for path in self._paths:
            try:
                _replace(path, data)
            except OSError as error:
                raise TierError(
                    f"{path} cannot be written: {error.strerror}; the retirement is not in force"
                ) from error

    def _read(self, path: Path) -> Retired:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Retired)
        except FileNotFoundError:
            return Retired()
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read (%s): everything stored so far counts as retired", path, error)
            now = self._now()
            return Retired(epoch=now, floor=now)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".partial")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
