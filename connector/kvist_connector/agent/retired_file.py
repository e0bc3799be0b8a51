"""What an agent knows to be retired, in files that live as long as its tiers: beside the arena, on its disk.

Written before a retirement takes effect, so that no restart serves what was retired. A file that cannot
be read counts as if it retired everything stored so far.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.protocol.retired import Retired

log = logging.getLogger(__name__)
FILE = "retired.json"


class RetiredFile:
    """`now`: an epoch above all that can have been given out before, for files that cannot be read."""

    def __init__(self, arena: Path, disk: Path | None, now: Callable[[], int]) -> None:
        self._paths = [arena.with_name(f"{arena.name}.{FILE}")]
        self._paths += [disk / FILE] if disk is not None else []
        self._disk = disk
        self._devices: dict[Path, int | None] = {}  # that the folders lay on
        self._now = now

    def read(self) -> Retired:
        """What all files say together; once, before `write`."""
        found = Retired()
        for path in self._paths:
            found = found.merge(self._read(path))
            self._devices[path] = _device(path.parent)
        return found

    def write(self, retired: Retired) -> None:
        """Replace every file, durably; a crash leaves the old or the new one of each.

        Raises TierError; StorageFull when it is the disk of the tier that has no room.
        """
        data = msgspec.json.encode(retired)
        for path in self._paths:
            self._refuse_elsewhere(path)
            try:
                _replace(path, data)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT) and path.parent == self._disk
                raise (StorageFull if full else TierError)(
                    f"{path} cannot be written: {error.strerror}; the retirement is not in force"
                ) from error

    def _refuse_elsewhere(self, path: Path) -> None:
        before, now = self._devices.get(path), _device(path.parent)
        if None not in (before, now) and before != now:
            # What a volume holds that is not mounted now would be back with it, and the rule would not.
            raise TierError(
                f"{path.parent} is another file system than at the start; the retirement is not in force: "
                "mount that one, or restart the agent"
            )

    def _read(self, path: Path) -> Retired:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Retired)
        except FileNotFoundError:
            return Retired()
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read (%s): everything stored so far counts as retired", path, error)
            now = self._now()
            return Retired(epoch=now, floor=now)


def _device(folder: Path) -> int | None:
    try:
        return folder.stat().st_dev
    except OSError:
        return None


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".partial")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # half of it would take room where there is none
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
