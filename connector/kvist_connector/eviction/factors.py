"""Rates of reuse of every kind of chunk from what was seen of some: a product of one factor for each trait.

There are a hundred thousand kinds and few uses of each, so kinds are not learned one by one. The rate of
a kind at an age is that of all chunks at that age times a factor for each of its traits, such as a short
answer. A factor is the uses seen of all chunks with the trait over those expected from the factors before
it (iterative proportional fitting, Deming and Stephan 1940, each observation taken once as it comes; by
age, as in additive hazard models). A trait seen little has a factor near 1.

What was seen counts less and less. Factors are found anew from time to time, a trait in each call, so that
no call takes long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from kvist_connector.eviction import rates
from kvist_connector.eviction.visit import Kind, kind

_DOUBT: Final = 100.0  # uses as expected that a trait is taken to have had, in all and around each age
_KEEP: Final = 0.97  # of what was learned counts after each round
_OFTEN: Final = 256  # observations between two rounds at first,
_SELDOM: Final = 2000  # and later
_PART: Final = 4  # until then this part of all there were
_MOST_VALUES: Final = 4096  # kinds whose values are at hand

Trait = tuple[int, int]  # place in `_traits`, value


class Seen(msgspec.Struct, array_like=True):
    """Of the chunks with one trait, by bucket of age: uses, and those expected (of all chunks: time)."""

    uses: list[float]
    expected: list[float]


class Learned(msgspec.Struct, frozen=True, array_like=True):
    """All that was learned, to go on from."""

    observations: int
    every: Seen
    traits: dict[Trait, Seen]

    @property
    def sound(self) -> bool:
        """Whether every number is one that could have been learned."""
        return self.observations >= 0 and all(
            len(counts) == rates.BUCKETS and all(0 <= count < float("inf") for count in counts)
            for seen in (self.every, *self.traits.values())
            for counts in (seen.uses, seen.expected)
        )


class _Counts:
    """`Seen` while it grows. Arrays: a list takes four times as much."""

    __slots__ = ("expected", "uses")

    def __init__(self, start: Seen | None = None) -> None:
        zeros = bytes(8 * rates.BUCKETS)
        self.uses = array("d", start.uses if start is not None else zeros)
        self.expected = array("d", start.expected if start is not None else zeros)

    def seen(self) -> Seen:
        return Seen(list(self.uses), list(self.expected))

    def fade(self) -> None:
        """They count less from now on."""
        self.uses = array("d", (_KEEP * count for count in self.uses))
        self.expected = array("d", (_KEEP * count for count in self.expected))


class Factors:
    """At most some hundred traits; each has two counts and a factor for each of 48 ages."""

    def __init__(self, learned: Learned | None = None) -> None:
        self._observations = self._round = learned.observations if learned is not None else 0
        self._every = _Counts(learned.every if learned is not None else None)
        traits = learned.traits if learned is not None else {}
        self._seen = {trait: _Counts(seen) for trait, seen in traits.items()}
        self._base = rates.overall(self._every.uses, self._every.expected)
        self._factors = {trait: _factor(seen) for trait, seen in self._seen.items()}
        self._values: dict[int, array[float]] = {}
        self._traits_of: dict[int, tuple[Trait, ...]] = {}
        self._work: Iterator[None] | None = None  # round under way

    def learned(self) -> Learned:
        """A copy."""
        traits = {trait: seen.seen() for trait, seen in self._seen.items()}
        return Learned(self._observations, self._every.seen(), traits)

    def values(self, number: int) -> Sequence[float]:
        """Value of each bucket of age, for chunks of that cell."""
        found = self._values.get(number)
        if found is None:
            if len(self._values) >= _MOST_VALUES:
                self._values.clear()
            found = self._values[number] = array("d", rates.best_rates(self._rates(number)))
        return found

    def observe(self, number: int, bucket: int, uses: float, spent: float) -> None:
        """Chunks of that cell spent so much time at that age and were used so often."""
        self._every.uses[bucket] += uses
        self._every.expected[bucket] += spent
        expected = spent * self._base[bucket]
        for trait in self._traits(number):
            seen = self._seen.get(trait)
            if seen is None:
                seen = self._seen[trait] = _Counts()
                self._factors[trait] = array("d", [1.0] * rates.BUCKETS)
            seen.uses[bucket] += uses
            seen.expected[bucket] += expected
            expected *= self._factors[trait][bucket]

    def step(self) -> None:
        """A step of the round under way, or of the next once it is time."""
        self._observations += 1
        if self._work is None:
            pause = max(_OFTEN, min(_SELDOM, self._observations // _PART))
            if self._observations - self._round < pause:
                return
            self._round = self._observations
            self._work = self._revise()
        if next(self._work, self) is self:
            self._work = None

    def _revise(self) -> Iterator[None]:
        self._base = rates.overall(self._every.uses, self._every.expected)
        self._every.fade()
        for trait, seen in list(self._seen.items()):
            self._factors[trait] = _factor(seen)
            seen.fade()
            yield
        self._values.clear()
        self._traits_of.clear()

    def _traits(self, number: int) -> tuple[Trait, ...]:
        found = self._traits_of.get(number)
        if found is None:
            found = self._traits_of[number] = tuple(enumerate(_traits(kind(number))))
        return found

    def _rates(self, number: int) -> list[float]:
        found = self._base
        for trait in self._traits(number):
            factor = self._factors.get(trait)
            if factor is not None:
                found = [rate * times for rate, times in zip(found, factor, strict=True)]
        return found


def _traits(of: Kind) -> tuple[int, ...]:
    """In the order in which their factors are found: what says more of reuse comes first."""
    return (
        of.continued,
        of.uses,
        of.answer,
        of.length,
        2 * of.fresh + (of.uses == 0),
        of.share,
        16 * min(of.uses, 3) + of.answer,
        16 * of.length + of.answer,
    )


def _factor(seen: _Counts) -> array[float]:
    """By age, over a bucket and its neighbours; near the factor of all ages where little was seen."""
    known = (sum(seen.uses) + _DOUBT) / (sum(seen.expected) + _DOUBT)
    counts = zip(_around(seen.uses), _around(seen.expected), strict=True)
    return array("d", ((uses + _DOUBT * known) / (expected + _DOUBT) for uses, expected in counts))


def _around(counts: Sequence[float]) -> Iterator[float]:
    wide = [0.0, *counts, 0.0]
    return (a + b + c for a, b, c in zip(wide, wide[1:], wide[2:], strict=False))
