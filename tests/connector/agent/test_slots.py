"""No slot is given to a writer while somebody else may write it; nothing is readable under a wrong key.

A naive model is the oracle: it tracks every worker that was ever handed a slot reference and
still lives without having come to rest since, and knows nothing of batches or tickets.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist_connector.agent.slots import SlotTable
from kvist_connector.arena.geometry import file_bytes
from kvist_connector.arena.headers import Headers, State
from kvist_connector.protocol.engine import Geometry, SlotRef

SLOTS = 5
GEOMETRY = Geometry(slots=SLOTS, ranks=1, layers=1, layer_bytes=16, blocks=1, chunk_tokens=4)


class Slots(RuleBasedStateMachine):
    """One agent that restarts, one scheduler half, workers that come, rest and die."""

    @initialize()
    def start(self) -> None:
        self.file = bytearray(file_bytes(GEOMETRY))
        self.headers = Headers(self.file, SLOTS)
        self.table = SlotTable.fresh(self.headers, 1)
        self.granted: list[SlotRef] = []
        self.committed: dict[SlotRef, bytes] = {}
        self.living: set[str] = set()
        self.born = 0
        # Oracle: slot -> workers that may be copying into it for a reference that was abandoned.
        self.dangerous: dict[int, set[str]] = {}
        # What each worker was told at each moment: tickets it has seen since the quarantine.
        self.tickets: dict[str, int] = {}
        self.content: dict[int, bytes] = {}

    @rule()
    def worker_starts(self) -> None:
        self.born += 1
        self.living.add(f"w{self.born}")

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.living)))
        self.living.discard(member)
        for writers in self.dangerous.values():
            writers.discard(member)

    @rule()
    def agent_asks_locks(self) -> None:
        self.table.bury(set(self.living))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def worker_rests(self, data: st.DataObject) -> None:
        """It answers the newest Quiesce: all that began before is over."""
        member = data.draw(st.sampled_from(sorted(self.living)))
        for writers in self.dangerous.values():
            writers.discard(member)
        self.table.acknowledge(member, self.table.ticket)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def stale_answer(self, data: st.DataObject) -> None:
        """An answer to an older Quiesce must not free what was quarantined later."""
        member = data.draw(st.sampled_from(sorted(self.living)))
        self.table.acknowledge(member, self.table.ticket - 1 if self.table.ticket else 0)
        newest = {slot for slot in self.dangerous if member in self.dangerous[slot]}
        for slot in newest:
            if slot not in self.newest_batch:
                self.dangerous[slot].discard(member)

    @property
    def newest_batch(self) -> set[int]:
        return set(self.table._batches[-1].slots) if self.table._batches else set()

    @rule()
    def grant(self) -> None:
        ref = self.table.reserve()
        if ref is None:
            return
        assert not self.dangerous.get(ref.slot), f"slot {ref.slot} given away under a living writer"
        assert all(other.slot != ref.slot for other in self.granted)
        assert all(other.slot != ref.slot for other in self.committed)
        self.granted.append(ref)
        # Any living worker writes its own bytes now, as the protocol allows.
        self.content[ref.slot] = ref.generation.to_bytes(16, "little")

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.granted))
        self.granted.remove(ref)
        self.table.commit(ref, self.content[ref.slot], 0)
        self.committed[ref] = self.content[ref.slot]

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.granted))
        self.granted.remove(ref)
        self.table.discard(ref)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(sorted(self.committed, key=lambda ref: ref.slot)))
        del self.committed[ref]
        self.table.free(ref)
        assert not self.headers.holds(ref.slot, ref.generation, State.COMMITTED)

    @rule()
    def scheduler_vanishes(self) -> None:
        self._abandon()
        self.table.quarantine(self.granted, self.living)
        self.granted = []

    @rule()
    def agent_restarts(self) -> None:
        """All it has is the file; every grant is void, committed slots survive."""
        self._abandon()
        self.granted = []
        still = {slot: set(writers) for slot, writers in self.dangerous.items()}
        self.table = SlotTable.resume(self.headers, self.living)
        assert {ref: header.key for ref, header in self.table.committed()} == self.committed
        self.dangerous = still

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), kept=st.integers(0, 16))
    def agent_dies_in_mid_write(self, data: st.DataObject, kept: int) -> None:
        """A commit is cut after some of its stores; the header must not turn readable under a wrong key."""
        ref = data.draw(st.sampled_from(self.granted))
        cut = (b"k" * kept).ljust(16, b"\0")
        self.headers.write(ref.slot, ref.generation, State.QUARANTINE, cut)
        self.agent_restarts()

    def _abandon(self) -> None:
        for ref in self.granted:
            if self.living:
                self.dangerous.setdefault(ref.slot, set()).update(self.living)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "table"):
            self.table.check_integrity()
            for ref, key in self.committed.items():
                assert self.headers.holds(ref.slot, ref.generation, State.COMMITTED)
                assert self.headers.read(ref.slot).key == key


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def table(slots: int = 2) -> SlotTable:
    geometry = Geometry(slots=slots, ranks=1, layers=1, layer_bytes=16, blocks=1, chunk_tokens=4)
    return SlotTable.fresh(Headers(bytearray(file_bytes(geometry)), slots), 1)


def test_a_quarantined_slot_waits_for_every_worker():
    slots = table(1)
    ref = slots.reserve()
    slots.quarantine([ref], {"a", "b"})
    assert slots.reserve() is None
    assert not slots.acknowledge("a", slots.ticket)
    assert slots.awaited() == {"b"}
    assert slots.bury(set())
    again = slots.reserve()
    assert again is not None
    assert again.generation > ref.generation


def test_an_answer_to_an_earlier_question_does_not_count():
    slots = table(2)
    first, second = slots.reserve(), slots.reserve()
    slots.quarantine([first], {"a"})
    early = slots.ticket
    slots.quarantine([second], {"a"})
    slots.acknowledge("a", early)
    assert slots.reserve().slot == first.slot
    assert slots.reserve() is None


def test_without_workers_quarantine_ends_at_once():
    slots = table(1)
    slots.quarantine([slots.reserve()], set())
    assert slots.reserve() is not None


def test_a_stale_reference_is_refused():
    slots = table(1)
    ref = slots.reserve()
    slots.discard(ref)
    with pytest.raises(ValueError, match="not RESERVED"):
        slots.commit(ref, bytes(16), 0)


def test_after_a_restart_every_unfinished_slot_comes_back_in_the_end():
    geometry = Geometry(slots=4, ranks=1, layers=1, layer_bytes=16, blocks=1, chunk_tokens=4)
    headers = Headers(bytearray(file_bytes(geometry)), 4)
    slots = SlotTable.fresh(headers, 1)
    kept, reserved, _ = slots.reserve(), slots.reserve(), slots.reserve()
    slots.commit(kept, b"k" * 16, 0)
    slots.quarantine([reserved], {"a"})
    again = SlotTable.resume(headers, {"a"})
    assert again.counts() == {"free": 1, "reserved": 0, "committed": 1, "quarantine": 2}
    again.acknowledge("a", again.ticket)
    assert again.counts() == {"free": 3, "reserved": 0, "committed": 1, "quarantine": 0}
