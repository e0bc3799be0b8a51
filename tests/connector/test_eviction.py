"""Eviction: children first, blocked never, and the order a naive search would choose."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist_connector.eviction import CostAware, EvictionIndex, Lru, policy


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class AgainstNaive(RuleBasedStateMachine):
    """The clever index against a list that is searched."""

    @initialize(name=st.sampled_from(["lru", "cost"]))
    def start(self, name):
        self.index = EvictionIndex(policy(name))
        self.chunks = {}
        self.clock = 0.0
        self.next = 1

    @rule(parent=st.integers(0, 30), size=st.integers(1, 5), weight=st.floats(0.1, 10))
    def add(self, parent, size, weight):
        self.clock += 1
        self.index.add(key(self.next), key(parent), size, weight, self.clock)
        self.chunks[self.next] = {"parent": parent, "blocked": 0}
        self.next += 1

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def touch(self, data):
        self.clock += 1
        self.index.touch(key(data.draw(st.sampled_from(sorted(self.chunks)))), self.clock)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data(), weight=st.floats(0.1, 10))
    def weigh(self, data, weight):
        self.index.weigh(key(data.draw(st.sampled_from(sorted(self.chunks)))), weight)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def block(self, data):
        number = data.draw(st.sampled_from(sorted(self.chunks)))
        self.index.block(key(number))
        self.chunks[number]["blocked"] += 1

    @precondition(lambda self: any(chunk["blocked"] for chunk in self.chunks.values()))
    @rule(data=st.data())
    def unblock(self, data):
        number = data.draw(st.sampled_from(sorted(n for n, c in self.chunks.items() if c["blocked"])))
        self.index.unblock(key(number))
        self.chunks[number]["blocked"] -= 1

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def remove(self, data):
        number = data.draw(st.sampled_from(sorted(self.chunks)))
        self.index.remove(key(number))
        del self.chunks[number]

    @rule()
    def pop(self):
        parents = {chunk["parent"] for chunk in self.chunks.values()}
        leaves = [n for n, c in self.chunks.items() if not c["blocked"] and n not in parents]
        worth = {n: self.index.worth(key(n)) for n in leaves}
        found = self.index.pop()
        assert (found is None) == (not leaves)
        if found is not None:
            number = int.from_bytes(found.key, "big")
            assert number in leaves
            assert worth[number] == min(worth.values())
            del self.chunks[number]

    @invariant()
    def books_agree(self):
        if hasattr(self, "index"):
            self.index.check_integrity()
            assert len(self.index) == len(self.chunks)


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def drain(index):
    found = []
    while (victim := index.pop()) is not None:
        found.append(int.from_bytes(victim.key, "big"))
    return found


def test_lru_goes_by_last_use():
    index = EvictionIndex(Lru())
    for number in (1, 2, 3):
        index.add(key(number), key(100 + number), 1, 1.0, float(number))
    index.touch(key(1), 9.0)
    assert drain(index) == [2, 3, 1]


def test_children_leave_before_their_parents():
    index = EvictionIndex(Lru())
    for number in (1, 2, 3):
        index.add(key(number), key(number - 1), 1, 1.0, float(number))
    assert drain(index) == [3, 2, 1]


def test_cost_prefers_chunks_that_save_more_per_byte():
    index = EvictionIndex(CostAware())
    index.add(key(1), key(101), 100, 1.0, 1.0)
    index.add(key(2), key(102), 100, 5.0, 1.0)
    index.add(key(3), key(103), 1000, 5.0, 1.0)
    assert drain(index) == [3, 1, 2]


def test_cost_lets_what_was_popular_once_grow_old():
    index = EvictionIndex(CostAware())
    index.add(key(1), key(1 << 40), 1 << 20, 1.0, 0.0)
    for _ in range(5):
        index.touch(key(1), 0.0)
    for number in range(2, 3000):
        index.add(key(number), key(number + (1 << 40)), 1 << 20, 1.0, 0.0)
        if number > 32:
            index.pop()
    assert key(1) not in index


def test_cost_learns_which_chunks_come_back():
    """Conversations of which those that went on once go on for ever, among prompts sent once."""
    index = EvictionIndex(CostAware())
    for number in range(1, 4000):
        if number % 40 == 0:
            for old in range(10_001, 10_001 + 8):
                if key(old) in index:
                    index.touch(key(old), float(number))
                else:
                    index.add(key(old), key(old + (1 << 40)), 1, 1.0, float(number))
        index.add(key(number), key(number + (1 << 40)), 1, 1.0, float(number))
        while len(index) > 24:
            index.pop()
    assert all(key(old) in index for old in range(10_001, 10_001 + 8))


def test_cost_learns_from_lives_that_go_on():
    """Before any has ended: prompts sent thrice at once and never again, among others that come in turn."""
    index, hits = EvictionIndex(CostAware()), 0
    for number in range(1200):
        burst, other = key(1_000_000 + number), key(10_000 + number % 300)
        index.add(burst, key(number + (1 << 40)), 1, 1.0, float(number))
        index.touch(burst, float(number))
        index.touch(burst, float(number))
        if other in index:
            index.touch(other, float(number))
            hits += number >= 600
        else:
            index.add(other, key(number + (1 << 41)), 1, 1.0, float(number))
        while len(index) > 400:
            index.pop()
    assert hits > 450  # LRU: none, since 300 others and 600 bursts lie between two uses


def test_misuse_is_refused():
    index = EvictionIndex(Lru())
    index.add(key(1), key(0), 1, 1.0, 0.0)
    with pytest.raises(ValueError, match="already"):
        index.add(key(1), key(0), 1, 1.0, 0.0)
    with pytest.raises(ValueError, match="not blocked"):
        index.unblock(key(1))
