"""Files that settings name: tokens, passwords, keys, lists. Called by whoever needs what is in one.

What is put there while we run may be anything: opening a pipe would wait for ever, and so would reading a
device. So only regular files are read, up to a bound.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

MOST_BYTES: Final = 2**20


def bytes_of(path: Path, most: int = MOST_BYTES) -> bytes:
    """What is in the file. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(fd, "rb", closefd=False) as file:
            data = file.read(most + 1)
    finally:
        os.close(fd)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most} bytes", str(path))
    return data


def text_of(path: Path, most: int = MOST_BYTES) -> str:
    """The same as text. Raises UnicodeDecodeError, too."""
    return bytes_of(path, most).decode()
