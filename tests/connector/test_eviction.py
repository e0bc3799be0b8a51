"""Eviction: children first, blocked never, and the order a naive search would choose."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist_connector.eviction import CostAware, EvictionIndex, Lru, policy
from kvist_connector.eviction.rates import BUCKETS, EDGES, best_rates
from kvist_connector.eviction.visit import Kind, cell, kind, place


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

    @rule(parent=st.integers(0, 20), size=st.integers(1, 5), weight=st.floats(0.1, 10))
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

    @precondition(lambda self: self.chunks)
    @rule(data=st.data(), tokens=st.none() | st.integers(0, 3000))
    def answer(self, data, tokens):
        self.index.answer(key(data.draw(st.sampled_from(sorted(self.chunks)))), tokens)

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


def asked_again(cold, warm):
    """Of 100 prompts that are sent twice, with 300 others in between, how many are there the second time.

    `cold` and `warm` send one prompt of each kind to the index; the tier holds 200 chunks.
    """
    index, hits = EvictionIndex(CostAware()), 0
    for number in range(1200):
        warm(index, number)
        for other in range(5):
            cold(index, 2000 + 5 * number + other)
        if number >= 60:
            hits += warm(index, number - 60) and number >= 1100
        while len(index) > 200:
            index.pop()
    return hits


def send(index, prompt, chunks, answer=0):
    """Whether its first chunk was there. The prompts' chunks are distinct."""
    names, there = [key(1000 * prompt + at) for at in range(chunks)], False
    for at, name in enumerate(names):
        if name in index:
            there = there or at == 0
            index.touch(name, 0.0)
        else:
            index.add(name, names[at - 1] if at else key(2**60 + prompt), 1, 1.0, 0.0)
    index.answer(names[-1])
    index.answer(names[-1], answer)
    return there


def test_cost_learns_from_the_length_of_answers():
    """Prompts with short answers come again, after more others than the tier holds."""
    hits = asked_again(lambda i, p: send(i, p, 1, answer=90), lambda i, p: send(i, p, 1, answer=40))
    assert hits > 90  # LRU: none


def test_chunks_that_come_after_the_prompt_are_its_answer():
    def answered(index, prompt):
        there = send(index, prompt, 1, None)
        if key(1000 * prompt + 1) not in index:
            index.add(key(1000 * prompt + 1), key(1000 * prompt), 1, 1.0, 0.0)
        return there

    assert asked_again(answered, lambda i, p: send(i, p, 1, None)) > 90


def test_cost_learns_from_the_length_of_prompts():
    assert asked_again(lambda i, p: send(i, p, 4), lambda i, p: send(i, p, 1)) > 90


def test_an_answer_to_an_unknown_prompt_is_nothing():
    index = EvictionIndex(CostAware())
    index.answer(key(1), 1)
    assert index.pop() is None


def naive_best(rates, place):
    """The most uses per time over all horizons, one after another."""
    uses = time = best = 0.0
    waiting = 1.0
    for at in range(place, len(rates)):
        width = EDGES[at + 1] - EDGES[at]
        used = -math.expm1(-rates[at] * (width / 2 if at == place else width))
        uses, time, waiting = uses + waiting * used, time + waiting * used / rates[at], waiting * (1 - used)
        best = max(best, uses / time)
    return best


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=BUCKETS))
def test_the_value_of_an_age_is_the_best_over_all_further_ages(rates):
    values = best_rates(rates)
    assert values == pytest.approx([naive_best(rates, place) for place in range(len(rates))], rel=1e-6)


@given(
    st.builds(
        Kind,
        st.integers(0, 1),
        st.integers(0, 7),
        st.integers(0, 11),
        st.integers(0, 11),
        st.integers(0, 9),
        st.integers(0, 4),
    )
)
def test_every_kind_has_a_number_of_its_own(one):
    code = ((one.share * 12 + one.length) * 10 + one.fresh) * 12 + one.answer
    assert kind(cell(code, place(one.uses, bool(one.continued)))) == one


def test_misuse_is_refused():
    index = EvictionIndex(Lru())
    index.add(key(1), key(0), 1, 1.0, 0.0)
    with pytest.raises(ValueError, match="already"):
        index.add(key(1), key(0), 1, 1.0, 0.0)
    with pytest.raises(ValueError, match="not blocked"):
        index.unblock(key(1))
