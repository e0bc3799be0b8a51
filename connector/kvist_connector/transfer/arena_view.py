"""A worker's mapping of the arena: the slot headers and its own rank's region.

Opened on the worker's reader thread when the agent announces an arena; used by the
copy code between steps. The file is mapped twice: superblock and headers, and the
region of this rank only, so a worker's memory accounting never covers other ranks.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvist_connector.arena import geometry as layout
from kvist_connector.arena.headers import Headers, State
from kvist_connector.errors import IntegrityError, UnsupportedError
from kvist_connector.protocol.engine import Geometry
from kvist_connector.transfer.plan import Piece

POPULATE_BYTES = 64 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # Linux 5.14; absent from the mmap module


class ArenaView:
    """Headers and region of one rank. `bytes_of` slots are raw bytes, layer after layer."""

    def __init__(self, path: Path, geometry: Geometry, rank: int, epoch: int = 0) -> None:
        if not 0 <= rank < geometry.ranks:
            raise UnsupportedError(f"rank {rank} is outside the arena's {geometry.ranks} ranks")
        self.path = path
        self.geometry = geometry
        self.rank = rank
        self.epoch = epoch  # the agent's, when it last announced this file
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            self.identity = (status.st_dev, status.st_ino)
            self._check_file(fd, status.st_size)
            self._header_map = mmap.mmap(fd, layout.data_offset(geometry))
            self._region_map = mmap.mmap(
                fd, layout.region_bytes(geometry), offset=layout.region_offset(geometry, rank)
            )
        finally:
            os.close(fd)
        self.headers = Headers(self._header_map, geometry.slots)
        used = geometry.slots * layout.slot_bytes(geometry)
        flat: npt.NDArray[np.uint8] = np.frombuffer(self._region_map, dtype=np.uint8, count=used)
        self.slots = flat.reshape(geometry.slots, geometry.layers, geometry.layer_bytes)

    def committed(self, piece: Piece) -> bool:
        """Whether the slot still holds the chunk that the piece wants to load."""
        if not 0 <= piece.slot < self.geometry.slots:
            return False
        header = self.headers.read(piece.slot)
        return (header.generation, header.state, header.key) == (
            piece.generation,
            State.COMMITTED,
            piece.key,
        )

    def reserved(self, piece: Piece) -> bool:
        """Whether the slot is still ours to fill."""
        return 0 <= piece.slot < self.geometry.slots and self.headers.holds(
            piece.slot, piece.generation, State.RESERVED
        )

    def populate(self) -> None:
        """Map every page now, in pieces; else the first copy of each slot pays for its faults."""
        length = len(self._region_map)
        for start in range(0, length, POPULATE_BYTES):
            try:
                self._region_map.madvise(_MADV_POPULATE_WRITE, start, min(POPULATE_BYTES, length - start))
            except (OSError, ValueError):
                return  # an older kernel: pages are mapped when they are first touched

    def close(self) -> None:
        """Unmap. A copy that still holds an array keeps its mapping alive until it ends."""
        del self.slots
        self.headers = Headers(bytearray(), 0)
        for mapping in (self._header_map, self._region_map):
            try:
                mapping.close()
            except BufferError:
                continue  # exported to an array in use; freed with it

    def _check_file(self, fd: int, size: int) -> None:
        found, _, _ = layout.unpack_superblock(os.pread(fd, layout.PAGE, 0))
        if found != self.geometry:
            raise UnsupportedError(f"arena {self.path} has geometry {found}, announced was {self.geometry}")
        if size < layout.file_bytes(self.geometry):
            raise IntegrityError(
                f"arena {self.path} has {size} bytes, its geometry needs {layout.file_bytes(self.geometry)}"
            )
