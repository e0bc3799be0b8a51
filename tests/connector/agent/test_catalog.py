"""Catalog and leases against a naive model; journal torn at any byte."""

import errno
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist_connector.agent.catalog import Catalog
from kvist_connector.agent.journal import Entry, Journal
from kvist_connector.agent.leases import LeaseBook
from kvist_connector.protocol.engine import SlotRef
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.fake_engine import layout


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.mark.parametrize("rule_name", ["lru", "cost"])
def test_the_garbage_collector_need_not_look_at_chunks(rule_name):
    """Of a million it would take seconds, and lookups wait meanwhile."""
    catalog, chunks, chain = Catalog(rule_name, [Tier.DISK]), 4096, 64
    gc.collect()
    before = len(gc.get_objects())
    for number in range(1, chunks + 1):
        position = (number - 1) % chain
        parent = key(number - 1) if position else key(0)
        catalog.enter_memory(key(number), parent, position, 1, SlotRef(number, 1), float(number))
        catalog.enter_below(Tier.DISK, key(number), parent, position, 1, float(number))
    gc.collect()
    assert len(gc.get_objects()) - before < chunks / 4
    # Nor are there two copies of a key.
    assert catalog.get(key(2)).parent is catalog.get(key(1)).key


class CatalogMachine(RuleBasedStateMachine):
    """Places by key, leases by request, slots by hand; the feed's watcher as a second witness."""

    @initialize(rule_name=st.sampled_from(["lru", "cost"]))
    def start(self, rule_name):
        self.catalog = Catalog(rule_name, [Tier.DISK])
        self.seen = {Tier.MEMORY: set(), Tier.DISK: set()}
        self.gone = []
        self.catalog.on_change = self._changed
        self.catalog.on_gone = self.gone.append
        self.memory, self.disk = {}, set()
        self.slot_of_dropped = {}
        self.next_slot = 0
        self.freed = set()
        self.book = LeaseBook(self.catalog.hold, self._let_go)
        self.leases = {}
        self.clock = 0.0

    def _changed(self, tier, name, added):
        assert added != (name in self.seen[tier]), "the feed was told the same twice"
        (self.seen[tier].add if added else self.seen[tier].discard)(name)

    def _let_go(self, hold):
        for chunk in self.catalog.ended(hold):
            ref = self.catalog.unlease(chunk)
            if ref is not None:
                self._free(ref)

    def _free(self, ref):
        assert ref not in self.freed, "a slot was given back twice"
        assert ref not in [held for chain in self.leases.values() for held in chain], "freed under a lease"
        self.freed.add(ref)

    @rule(number=st.integers(1, 6))
    def commit(self, number):
        if number in self.memory:
            return
        self.clock += 1
        self.next_slot += 1
        ref = SlotRef(self.next_slot, 1)
        self.catalog.enter_memory(key(number), key(number - 1), number - 1, 10, ref, self.clock)
        self.memory[number] = ref

    @rule(number=st.integers(1, 6))
    def write(self, number):
        self.catalog.enter_below(Tier.DISK, key(number), key(number - 1), number - 1, 12, self.clock)
        self.disk.add(number)

    @rule(number=st.integers(1, 6))
    def lose_file(self, number):
        self.catalog.leave_below(Tier.DISK, key(number))
        self.disk.discard(number)

    @precondition(lambda self: self.memory)
    @rule(data=st.data())
    def drop(self, data):
        number = data.draw(st.sampled_from(sorted(self.memory)))
        if data.draw(st.booleans()):
            used = any(self.memory[number] in chain for chain in self.leases.values())
            assert self.catalog.is_leased(self.catalog.resident(key(number))) == used
        ref = self.catalog.leave_memory(self.catalog.resident(key(number)))
        leased = any(self.memory[number] in chain for chain in self.leases.values())
        assert (ref is None) == leased
        del self.memory[number]
        if ref is not None:
            self._free(ref)

    @rule(tier=st.sampled_from([Tier.MEMORY, Tier.DISK]))
    def evict(self, tier):
        victim = self.catalog.victim(tier)
        held = set(self.memory) if tier == Tier.MEMORY else self.disk
        leased = {
            number
            for number, ref in self.memory.items()
            if tier == Tier.MEMORY and any(ref in chain for chain in self.leases.values())
        }
        leaves = {number for number in held if number + 1 not in held} - leased
        assert (victim is None) == (not leaves)
        if victim is None:
            return
        number = int.from_bytes(victim.key, "big")
        assert number in leaves
        if tier == Tier.MEMORY:
            self._free(self.catalog.leave_memory(victim))
            del self.memory[number]
        else:
            self.catalog.leave_below(Tier.DISK, victim.key)
            self.disk.discard(number)

    @precondition(lambda self: self.memory)
    @rule(data=st.data(), request=st.sampled_from("abc"))
    def lease(self, data, request):
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.memory)), max_size=3))
        chunks = [self.catalog.resident(key(number)) for number in numbers]
        assert self.book.take(request, chunks)
        self.leases.setdefault(request, []).extend(self.memory[number] for number in numbers)

    @precondition(lambda self: 1 in self.memory)
    @rule(request=st.sampled_from("abc"), most=st.integers(1, 6))
    def lease_prompt(self, request, most):
        chunks = self.catalog.leading([key(number) for number in range(1, most + 1)])
        assert self.book.take(request, chunks)
        self.leases.setdefault(request, []).extend(self.memory[n] for n in range(1, len(chunks) + 1))

    @rule(request=st.sampled_from("abcd"))
    def release(self, request):
        self.leases.pop(request, None)
        self.book.release(request)

    @rule()
    def disconnect(self):
        self.leases.clear()
        self.book.release_all()
        assert self.book.chunks == 0

    @invariant()
    def books_agree(self):
        if not hasattr(self, "catalog"):
            return
        self.catalog.check_integrity()
        assert {key(number) for number in self.memory} == self.seen[Tier.MEMORY]
        assert {key(number) for number in self.disk} == self.seen[Tier.DISK]
        assert len(self.catalog) == len(set(self.memory) | self.disk)
        assert self.book.chunks == sum(len(chain) for chain in self.leases.values())


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@given(
    held=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dropped=st.lists(st.integers(1, 5), unique=True),
    order=st.randoms(use_true_random=False),
)
def test_a_slot_of_a_prompt_in_use_is_given_back_with_the_last_use_whatever_takes_it_out(
    held, dropped, order
):
    catalog, freed = Catalog("lru"), []
    for number in range(1, 6):
        catalog.enter_memory(key(number), key(number - 1), number - 1, 10, SlotRef(number, 1), 0.0)
    left = list(held)
    holds = [
        (most, catalog.hold(catalog.leading([key(number) for number in range(1, most + 1)]))) for most in held
    ]
    for number in dropped:
        ref = catalog.leave_memory(catalog.resident(key(number)))
        freed += [] if ref is None else [ref.slot]
        catalog.check_integrity()
    assert set(freed) == {number for number in dropped if number > max(left)}
    order.shuffle(holds)
    for most, hold in holds:
        left.remove(most)
        freed += [ref.slot for ref in map(catalog.unlease, catalog.ended(hold)) if ref is not None]
        assert set(freed) == {number for number in dropped if number > max(left, default=0)}
        catalog.check_integrity()
    assert len(freed) == len(dropped)


def test_the_last_chunk_of_a_prompt_keeps_those_before_it():
    catalog = Catalog("lru")
    for number in range(1, 4):
        catalog.enter_memory(key(number), key(number - 1), number - 1, 10, SlotRef(number, 1), 0.0)
    hold = catalog.hold(catalog.leading([key(1), key(2), key(3), key(9)]))
    assert [chunk.key for chunk in hold.chunks] == [key(1), key(2), key(3)]
    assert catalog.victim(Tier.MEMORY) is None
    assert all(catalog.is_leased(chunk) for chunk in hold.chunks)
    for chunk in catalog.ended(hold):
        assert catalog.unlease(chunk) is None
    assert catalog.victim(Tier.MEMORY).key == key(3)


def test_leases_are_bounded(monkeypatch):
    from kvist_connector.agent import leases

    monkeypatch.setattr(leases, "MAX_REQUESTS", 2)
    book = LeaseBook(lambda chunk: None, lambda chunk: None)
    assert book.take("a", [])
    assert book.take("b", [])
    assert not book.take("c", [])
    assert book.take("a", [])


def entry(number: int) -> Entry:
    return Entry(SlotRef(number, number), key(number), key(number - 1), number, (f"tag{number}",))


@given(cut=st.integers(0, 2000))
@settings(deadline=None, max_examples=60)
def test_a_journal_cut_anywhere_keeps_what_was_whole(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("journal") / "arena"
    journal = Journal(path)
    journal.rewrite(layout(), [entry(1)])
    whole = [(journal.path.stat().st_size, 1)]
    for number in range(2, 8):
        journal.append(entry(number))
        whole.append((journal.path.stat().st_size, number))
    journal.close()
    data = journal.path.read_bytes()[:cut]
    journal.path.write_bytes(data)
    found, entries = Journal(path).read()
    survived = [number for size, number in whole if size <= len(data)]
    assert [item.index for item in entries.values()][: len(survived)] == list(range(1, len(survived) + 1))
    assert len(entries) == len(survived)
    if survived:
        assert found == layout()
        assert entries[key(survived[-1])] == entry(survived[-1])


def test_a_flipped_byte_ends_the_journal_there(tmp_path):
    journal = Journal(tmp_path / "arena")
    journal.rewrite(layout(), [])
    start = journal.path.stat().st_size
    journal.append(entry(1))
    journal.append(entry(2))
    journal.close()
    data = bytearray(journal.path.read_bytes())
    data[start + 20] ^= 1
    journal.path.write_bytes(data)
    assert Journal(tmp_path / "arena").read() == (layout(), {})


def test_compaction_keeps_the_living_and_is_one_step(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "arena")
    journal.rewrite(layout(), [])
    for number in range(1, 3000):
        journal.append(entry(number))
    assert journal.due(living=10)
    import os

    def crash(*arguments):
        raise OSError("crash before the rename")

    monkeypatch.setattr(os, "replace", crash)
    journal.compact([entry(1)])
    assert journal.left_out == 1
    monkeypatch.undo()
    assert len(Journal(tmp_path / "arena").read()[1]) == 2999
    journal.compact([entry(1), entry(2)])
    assert not journal.due(living=2)
    journal.append(entry(3))
    journal.close()
    assert sorted(item.index for item in Journal(tmp_path / "arena").read()[1].values()) == [1, 2, 3]


def test_a_record_without_room_is_left_out_and_the_next_ones_are_read(tmp_path, monkeypatch):
    import os

    journal = Journal(tmp_path / "arena")
    journal.rewrite(layout(), [entry(1)])
    write = os.write

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    journal.append(entry(2))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    journal.append(entry(3))
    monkeypatch.undo()
    journal.append(entry(4))
    journal.close()
    assert journal.left_out == 2
    assert [item.index for item in Journal(tmp_path / "arena").read()[1].values()] == [1, 4]


def test_no_journal_is_an_empty_one(tmp_path):
    assert Journal(tmp_path / "arena").read() == (None, {})
