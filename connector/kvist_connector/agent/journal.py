"""The chain parents of committed slots, beside the arena file: `<arena>.journal`.

Slot headers say what a slot holds; the journal adds what a header has no room for (parent,
tags) and the layout that names the model. A record is appended before its header says
COMMITTED, so a committed slot without a record is one whose agent died in between: dropped.
Records are frames with a checksum; reading stops at the first bad one (a torn append).
The file lies in memory like the arena: a crash of the agent loses nothing, a reboot loses both.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from kvist_connector.errors import ConfigError
from kvist_connector.protocol.engine import Layout, SlotRef

log = logging.getLogger(__name__)
_LENGTH_BYTES = 4
_SUM_BYTES = 8
_SLACK = 1024


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One committed slot."""

    ref: SlotRef
    key: bytes
    parent: bytes
    index: int
    tags: tuple[str, ...] = ()
    epoch: int = 0
    lossy: bool = False


class Owner(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Whose chunks these are; the first record of a file."""

    layout: Layout


class Journal:
    """Append-only, rewritten when dead records outnumber living ones three to one."""

    def __init__(self, arena_path: Path) -> None:
        self.path = arena_path.with_name(arena_path.name + ".journal")
        self._temporary = self.path.with_name(self.path.name + ".partial")
        self._fd = -1
        self._records = 0
        self.left_out = 0
        self._layout: Layout | None = None

    def read(self) -> tuple[Layout | None, dict[bytes, Entry]]:
        """What an earlier agent left; the last record of a key counts."""
        layout: Layout | None = None
        entries: dict[bytes, Entry] = {}
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None, {}
        except OSError as error:
            raise ConfigError(f"arena: {self.path} cannot be read: {error.strerror}; remove it") from error
        for record in _records(data):
            if isinstance(record, Owner):
                layout, entries = record.layout, {}
            else:
                entries[record.key] = record
        return layout, entries

    def rewrite(self, layout: Layout, entries: Iterable[Entry]) -> None:
        """Replace the file in one step; a crash leaves the old or the new one. Raises ConfigError."""
        try:
            self._rewrite(layout, entries)
        except OSError as error:
            self._temporary.unlink(missing_ok=True)
            raise ConfigError(
                f"arena: {self.path} cannot be written: {error.strerror}; free space in {self.path.parent}"
            ) from error

    def _rewrite(self, layout: Layout, entries: Iterable[Entry]) -> None:
        records: list[Entry | Owner] = [Owner(layout), *entries]
        self._temporary.write_bytes(b"".join(_pack(record) for record in records))
        os.replace(self._temporary, self.path)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.close()
        self._fd = fd
        self._records = len(records)
        self._layout = layout

    def append(self, entry: Entry) -> None:
        """Called before the slot's header says COMMITTED. Without room for it a restart drops that chunk."""
        record, end = _pack(entry), os.fstat(self._fd).st_size
        try:
            whole = os.write(self._fd, record) == len(record)
        except OSError:
            whole = False
        if not whole:
            os.ftruncate(self._fd, end)  # what follows a torn record would not be read
            self._count_left_out()
        self._records += whole

    def due(self, living: int) -> bool:
        """Whether a rewrite pays."""
        return self._records > 4 * living + _SLACK

    def compact(self, entries: Iterable[Entry]) -> None:
        """Rewrite with only the living entries."""
        if self._layout is None:
            return
        try:
            self.rewrite(self._layout, entries)
        except ConfigError:
            self._count_left_out()
            self._records = 0  # the old file stays; tried again after as many records

    def _count_left_out(self) -> None:
        if not self.left_out:
            log.warning("%s: no room: a restart will drop chunks (further ones are only counted)", self.path)
        self.left_out += 1

    def close(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _pack(record: Entry | Owner) -> bytes:
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + xxhash.xxh3_64_digest(body) + body


def _records(data: bytes) -> Iterator[Entry | Owner]:
    decoder = msgspec.msgpack.Decoder(Entry | Owner)
    position = 0
    start = _LENGTH_BYTES + _SUM_BYTES
    while position + start <= len(data):
        length = int.from_bytes(data[position : position + _LENGTH_BYTES], "little")
        body = data[position + start : position + start + length]
        if len(body) < length or xxhash.xxh3_64_digest(body) != data[position + _LENGTH_BYTES :][:_SUM_BYTES]:
            return
        try:
            yield decoder.decode(body)
        except msgspec.MsgspecError:
            return
        position += start + length
