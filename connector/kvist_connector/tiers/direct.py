"""Transfers past the page cache: what O_DIRECT asks of addresses and lengths. Used by disk.py.

Slots of an arena and headers are whole pages, so chunks that are stored as they are need no copy but that of
their header. What is no whole pages goes through the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_connector.tiers.base import Buffer

ALIGNMENT: Final = 4096
# What lies elsewhere is copied up to this; more of it would cost more than the page cache does.
_COPIED_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class Aligned:
    """`views` have the bytes, or room for them, of the buffers that were given."""

    views: list[memoryview]
    copied: list[tuple[memoryview, memoryview]]  # a buffer that was given, and the view in its place

    def copy_back(self) -> None:
        """What was read into views belongs to the buffers."""
        for given, view in self.copied:
            given[:] = view


def aligned(buffers: Sequence[Buffer]) -> Aligned | None:
    """Views at whole pages; None when that is not possible without copying much."""
    found = Aligned([], [])
    for buffer in buffers:
        given = memoryview(buffer).cast("B")
        if given.nbytes % ALIGNMENT:
            return None
        if not given.nbytes:
            continue
        if not _is_aligned(given):
            if given.nbytes > _COPIED_BYTES:
                return None
            view = memoryview(mmap.mmap(-1, given.nbytes))
            view[:] = given
            found.copied.append((given, view))
            given = view
        found.views.append(given)
    return found


def is_possible(folder: Path) -> bool:
    """Whether the file system of a folder that may be written to can do it."""
    path = folder / ".direct"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    os.close(fd)
    return True


def _is_aligned(view: memoryview) -> bool:
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT == 0
