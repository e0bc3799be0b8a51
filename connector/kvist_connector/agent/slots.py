"""The slots' state machine: who may write where, and when a slot may be given away again.

Pure over `Headers` (no clock, no I/O); called by `agent.memory` on the agent's loop only.

    FREE --reserve--> RESERVED --commit--> COMMITTED --free--> FREE
                      RESERVED --discard--> FREE          (its owner says no copy runs)
                      RESERVED --quarantine--> QUARANTINE --all acknowledged--> FREE

The generation grows with every change but RESERVED -> COMMITTED, so a reference that was
valid once is never valid again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kvist_connector.arena.headers import NO_KEY, Header, Headers, State
from kvist_connector.protocol.engine import SlotRef

# Among members: it could not be seen who lives. No worker has this name.
UNKNOWN: Final = ""


@dataclass(slots=True)
class _Batch:
    """Slots quarantined together and the workers that may still write into them."""

    ticket: int
    slots: list[int]
    waiting: set[str] = field(default_factory=set)


class SlotTable:
    """State of every slot; the headers in the arena always say the same."""

    def __init__(self, headers: Headers) -> None:
        self._headers = headers
        self._state = [State.FREE] * headers.slots
        self._generation = [0] * headers.slots
        self._free: deque[int] = deque()
        self._batches: list[_Batch] = []
        self.ticket = 0  # of the newest quarantine

    @classmethod
    def fresh(cls, headers: Headers, first_generation: int) -> SlotTable:
        """All slots free. `first_generation` must be above every generation the file ever had."""
        table = cls(headers)
        for slot in range(headers.slots):
            table._generation[slot] = first_generation
            table._set(slot, State.FREE)
        table._free.extend(range(headers.slots))
        return table

    @classmethod
    def resume(cls, headers: Headers, members: Iterable[str]) -> SlotTable:
        """After a restart of the agent: committed slots stay, half-written ones are quarantined."""
        table = cls(headers)
        unsettled = []
        for slot in range(headers.slots):
            header = headers.read(slot)
            table._generation[slot] = header.generation
            table._state[slot] = header.state
            if header.state == State.FREE:
                table._free.append(slot)
            elif header.state != State.COMMITTED:
                unsettled.append(slot)
        table._isolate(unsettled, members)
        return table

    def committed(self) -> Iterator[tuple[SlotRef, Header]]:
        """Every committed slot with its header."""
        for slot, state in enumerate(self._state):
            if state == State.COMMITTED:
                yield SlotRef(slot, self._generation[slot]), self._headers.read(slot)

    @property
    def size(self) -> int:
        """Number of slots."""
        return len(self._state)

    @property
    def empty(self) -> int:
        """Slots that anybody may reserve now."""
        return len(self._free)

    def counts(self) -> dict[str, int]:
        """Slots by state, for stats and metrics."""
        return {state.name.lower(): self._state.count(state) for state in State}

    def holds(self, ref: SlotRef, state: State) -> bool:
        """Whether the slot is in this state at this generation."""
        return (
            0 <= ref.slot < len(self._state)
            and self._generation[ref.slot] == ref.generation
            and self._state[ref.slot] == state
        )

    def reserve(self) -> SlotRef | None:
        """A free slot for one writer, or None."""
        if not self._free:
            return None
        slot = self._free.popleft()
        return self._advance(slot, State.RESERVED)

    def commit(self, ref: SlotRef, key: bytes, index: int) -> None:
        """The writer is done: the slot becomes readable under the key."""
        self._require(ref, State.RESERVED)
        self._set(ref.slot, State.COMMITTED, key, index)

    def free(self, ref: SlotRef) -> None:
        """A committed slot is given up; readers notice by the header."""
        self._require(ref, State.COMMITTED)
        self._advance(ref.slot, State.FREE)
        self._free.append(ref.slot)

    def discard(self, ref: SlotRef) -> None:
        """A writer hands a slot back and promises that no copy into it runs or will run."""
        self._require(ref, State.RESERVED)
        self._advance(ref.slot, State.FREE)
        self._free.append(ref.slot)

    def quarantine(self, refs: Iterable[SlotRef], members: Iterable[str]) -> None:
        """The writer vanished: nobody gets these slots before all `members` acknowledged (UNKNOWN: never)."""
        slots = []
        for ref in refs:
            self._require(ref, State.RESERVED)
            slots.append(ref.slot)
        self._isolate(slots, members)

    def awaited(self) -> set[str]:
        """Members whose acknowledgement (or death) some quarantined slot waits for."""
        return {member for batch in self._batches for member in batch.waiting}

    def acknowledge(self, member: str, ticket: int) -> bool:
        """A member answered a Quiesce; true when slots became free."""
        for batch in self._batches:
            if batch.ticket <= ticket:
                batch.waiting.discard(member)
        return self._settle()

    def bury(self, living: set[str]) -> bool:
        """Only `living` members can still write (all are known now); true when slots became free."""
        for batch in self._batches:
            batch.waiting = set(living) if UNKNOWN in batch.waiting else batch.waiting & living
        return self._settle()

    def check_integrity(self) -> None:
        """Raises AssertionError when table, headers and lists disagree."""
        free = set(self._free)
        isolated = [slot for batch in self._batches for slot in batch.slots]
        assert len(free) == len(self._free), "a slot is twice in the free list"
        assert len(isolated) == len(set(isolated)), "a slot is twice in quarantine"
        for slot, state in enumerate(self._state):
            header = self._headers.read(slot)
            assert header.state == state, f"slot {slot}: header and table differ"
            assert header.generation == self._generation[slot], f"slot {slot}: generations differ"
            assert (state == State.FREE) == (slot in free), f"slot {slot}: free list is wrong"
            assert (state == State.QUARANTINE) == (slot in isolated), f"slot {slot}: quarantine is wrong"

    def _isolate(self, slots: list[int], members: Iterable[str]) -> None:
        if not slots:
            return
        for slot in slots:
            self._advance(slot, State.QUARANTINE)
        self.ticket += 1
        self._batches.append(_Batch(self.ticket, slots, set(members)))
        self._settle()

    def _settle(self) -> bool:
        done = [batch for batch in self._batches if not batch.waiting]
        self._batches = [batch for batch in self._batches if batch.waiting]
        for batch in done:
            for slot in batch.slots:
                self._advance(slot, State.FREE)
                self._free.append(slot)
        return bool(done)

    def _advance(self, slot: int, state: State) -> SlotRef:
        self._generation[slot] += 1
        self._set(slot, state)
        return SlotRef(slot, self._generation[slot])

    def _set(self, slot: int, state: State, key: bytes = NO_KEY, index: int = 0) -> None:
        self._state[slot] = state
        self._headers.write(slot, self._generation[slot], state, key, index)

    def _require(self, ref: SlotRef, state: State) -> None:
        if not self.holds(ref, state):
            raise ValueError(f"slot {ref.slot} generation {ref.generation} is not {state.name}")
