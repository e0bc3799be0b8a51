"""The folder of the socket at which relays find the mind. Called by keeper.py.

It is of this user only: whoever can connect learns what others have cached. Its keeper holds a lock on it
for as long as it lives, so one that nobody holds was left by a keeper that was killed; the next removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PREFIX: Final = "kvist-router-"
SOCKET: Final = "mind.sock"
_log = logging.getLogger(__name__)


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder in the one for temporary files, which goes at the end."""
    remove_leftovers(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name, _locked(Path(name)):
        yield Path(name)


def remove_leftovers(base: Path) -> None:
    """Remove what killed keepers left in `base`."""
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, of another user, or gone meanwhile
            _remove(path)


def _remove(path: Path) -> None:
    with _locked(path) as folder:
        if os.fstat(folder).st_uid != os.geteuid():
            return
        # Without a socket it is one that is being made: that comes after the lock.
        os.unlink(SOCKET, dir_fd=folder)
        path.rmdir()
    _log.info("removed %s, left by a router that was killed", path)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Its descriptor; raises OSError when another process has the lock."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(folder)
