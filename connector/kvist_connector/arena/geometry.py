"""Offsets in the arena file.

    0          superblock, one page: magic, format, geometry, fingerprint (written by the agent, last)
    4096       slot headers, 64 bytes each, padded to a page
    data       region of rank 0 | region of rank 1 | ...

    region of a rank: slot 0 | slot 1 | ...      a slot of one rank: layer 0 | layer 1 | ...

Rank-major, so that a worker maps, pins and registers only its own region.
The agent alone writes the superblock and the headers; workers write slot bytes.
"""

from __future__ import annotations

import struct

from kvist_connector.errors import UnsupportedError
from kvist_connector.protocol.engine import Geometry

PAGE = 4096
HEADER_BYTES = 64
MAGIC = b"KVISTARN"
FORMAT = 1
_SUPERBLOCK = struct.Struct(
    "<8sIIQIIQIIQH64s"
)  # magic, format, pad, slots, ranks, layers, layer_bytes, blocks, chunk_tokens, epoch, len, fingerprint


def slot_bytes(geometry: Geometry) -> int:
    """Bytes of one chunk of one rank."""
    return geometry.layers * geometry.layer_bytes


def chunk_bytes(geometry: Geometry) -> int:
    """Bytes of one chunk over all ranks: what a slot costs."""
    return slot_bytes(geometry) * geometry.ranks


def data_offset(geometry: Geometry) -> int:
    """Where the first region begins."""
    headers = geometry.slots * HEADER_BYTES
    return PAGE + (headers + PAGE - 1) // PAGE * PAGE


def region_offset(geometry: Geometry, rank: int) -> int:
    """Where the region of a rank begins; page-aligned, so it can be mapped alone."""
    return data_offset(geometry) + rank * region_bytes(geometry)


def region_bytes(geometry: Geometry) -> int:
    """Length of one rank's region, padded to a page."""
    return (geometry.slots * slot_bytes(geometry) + PAGE - 1) // PAGE * PAGE


def slot_offset(geometry: Geometry, rank: int, slot: int) -> int:
    """Where a rank's bytes of a slot begin."""
    return region_offset(geometry, rank) + slot * slot_bytes(geometry)


def header_offset(slot: int) -> int:
    """Where the header of a slot lies."""
    return PAGE + slot * HEADER_BYTES


def file_bytes(geometry: Geometry) -> int:
    """Length of the file that this geometry needs."""
    return region_offset(geometry, geometry.ranks)


def slots_that_fit(size: int, ranks: int, bytes_per_rank: int) -> int:
    """Most slots for which file_bytes stays within `size`; 0 when not even one fits."""
    per_slot = HEADER_BYTES + ranks * bytes_per_rank
    slots = max(0, (size - (2 + ranks) * PAGE) // per_slot)
    return int(slots)


def pack_superblock(geometry: Geometry, fingerprint: bytes, epoch: int) -> bytes:
    """The first bytes of the file."""
    if len(fingerprint) > 64:
        raise ValueError("a fingerprint has at most 64 bytes")
    g = geometry
    return _SUPERBLOCK.pack(
        MAGIC, FORMAT, 0, g.slots, g.ranks, g.layers, g.layer_bytes, g.blocks, g.chunk_tokens, epoch,
        len(fingerprint), fingerprint,
    )  # fmt: skip


def unpack_superblock(data: bytes) -> tuple[Geometry, bytes, int]:
    """Geometry, fingerprint and epoch; raises UnsupportedError on a foreign or newer file."""
    if len(data) < _SUPERBLOCK.size:
        raise UnsupportedError(f"arena superblock has {len(data)} bytes, expected {_SUPERBLOCK.size}")
    magic, fmt, _, slots, ranks, layers, layer_bytes, blocks, tokens, epoch, length, fingerprint = (
        _SUPERBLOCK.unpack_from(data)
    )
    if magic != MAGIC:
        raise UnsupportedError("the file is not a Kvist arena")
    if fmt != FORMAT:
        raise UnsupportedError(f"arena format {fmt} is not the supported format {FORMAT}")
    geometry = Geometry(
        slots=slots, ranks=ranks, layers=layers, layer_bytes=layer_bytes, blocks=blocks, chunk_tokens=tokens
    )
    return geometry, fingerprint[:length], epoch
