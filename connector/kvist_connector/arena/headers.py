"""Slot headers: 64 bytes in the arena that say what a slot holds right now.

The agent is the only writer. A worker checks the header before and after every copy:
a slot whose generation or state is not the promised one holds other bytes.

    offset 0   u64 generation   grows each time the slot is given to somebody
    offset 8   u32 state        State
    offset 12  u32 zero
    offset 16  16 bytes key     zeros until committed
    offset 32  u32 index, then zeros

Writes: state is QUARANTINE (nobody may read or write) while the other fields change and gets its
value last, so that no worker sees a usable state over a half-written header, and an agent killed
in mid-write leaves a slot that its successor quarantines.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from mmap import mmap

from kvist_connector.arena.geometry import header_offset

_GENERATION = struct.Struct("<Q")
_STATE = struct.Struct("<I")
_HEADER = struct.Struct("<QII16sI")
NO_KEY = bytes(16)


class State(IntEnum):
    """The life of a slot: FREE -> RESERVED -> COMMITTED -> FREE, or RESERVED -> QUARANTINE -> FREE."""

    FREE = 0
    RESERVED = 1  # given to a writer, contents undefined
    COMMITTED = 2  # readable
    QUARANTINE = 3  # its writer vanished: some worker may still be copying into it


@dataclass(frozen=True, slots=True)
class Header:
    """A header as read."""

    generation: int
    state: State
    key: bytes
    index: int


class Headers:
    """View of the headers in a mapping that starts at file offset 0."""

    def __init__(self, mapping: mmap | bytearray, slots: int) -> None:
        self._mapping = mapping
        self.slots = slots

    def read(self, slot: int) -> Header:
        """Header of a slot; an unknown state reads as QUARANTINE, never as readable."""
        generation, state, _, key, index = _HEADER.unpack_from(self._mapping, self._offset(slot))
        known = State(state) if state in State._value2member_map_ else State.QUARANTINE
        return Header(generation, known, key, index)

    def write(self, slot: int, generation: int, state: State, key: bytes = NO_KEY, index: int = 0) -> None:
        """Agent only."""
        offset = self._offset(slot)
        _STATE.pack_into(self._mapping, offset + 8, State.QUARANTINE)
        _GENERATION.pack_into(self._mapping, offset, generation)
        struct.pack_into("<16sI", self._mapping, offset + 16, key, index)
        _STATE.pack_into(self._mapping, offset + 8, state)

    def holds(self, slot: int, generation: int, state: State) -> bool:
        """The check before and after a copy."""
        offset = self._offset(slot)
        (found,) = _GENERATION.unpack_from(self._mapping, offset)
        (found_state,) = _STATE.unpack_from(self._mapping, offset + 8)
        return bool(found == generation and found_state == state)

    def _offset(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} is outside 0..{self.slots - 1}")
        return header_offset(slot)
