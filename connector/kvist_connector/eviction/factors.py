"""Rates of reuse of every kind of chunk from what was seen of some: a product of one factor for each trait.

There are thousands of kinds and few uses of each, so kinds are not learned one by one. The rate of
a kind at an age is that of all chunks at that age times a factor for each of its traits, such as being in its
third turn. Factors are fitted one trait after another: uses seen of all chunks with the trait over those
expected from the factors found so far (one round of iterative proportional fitting, Deming and Stephan
1940; by age, as in additive hazard models). A trait seen little has a factor near 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvist_connector.eviction import rates
from kvist_connector.eviction.visit import Kind, kind

_DOUBT: Final = 100.0  # uses as expected that a trait is taken to have had, in all and around each age
_STRIDE: Final = 2  # kinds between two pauses,
_LONG_STRIDE: Final = 8  # where one takes less

_Trait = tuple[int, int]  # place in Kind, value


@dataclass(slots=True)
class Seen:
    """Of one kind, by bucket of age."""

    kind: Kind
    uses: Sequence[float]
    spent: Sequence[float]
    rates: list[float] = field(default_factory=list)


class Factors:
    """`fit` is a generator so that no call takes long; until it is through, `values` are the former ones."""

    def __init__(self) -> None:
        self._base = [rates.SHAPE / edge for edge in rates.EDGES[:-1]]
        self._of: dict[_Trait, list[float]] = {}
        self._values: dict[int, list[float]] = {}

    def values(self, number: int) -> list[float]:
        """Value of each bucket of age, for chunks of that cell."""
        found = self._values.get(number)
        if found is None:
            found = self._values[number] = rates.best_rates(self._rates(kind(number)))
        return found

    def fit(self, cells: Iterator[tuple[int, Seen]]) -> Iterator[None]:
        """From all that was seen."""
        found: dict[int, Seen] = {}
        uses, spent = [0.0] * rates.BUCKETS, [0.0] * rates.BUCKETS
        for number, seen in cells:
            found[number] = seen
            uses, spent = _sum(uses, seen.uses), _sum(spent, seen.spent)
            if len(found) % _STRIDE == 0:
                yield
        every = list(found.values())
        base = rates.overall(uses, spent)
        for seen in every:
            seen.rates = base
        factors: dict[_Trait, list[float]] = {}
        for trait in range(len(Kind._fields)):
            yield from _fit_trait(trait, every, factors)
        values: dict[int, list[float]] = {}
        for number, seen in found.items():
            values[number] = rates.best_rates(seen.rates)
            if len(values) % _STRIDE == 0:
                yield
        self._base, self._of, self._values = base, factors, values

    def _rates(self, traits: Kind) -> list[float]:
        found = self._base
        for trait in enumerate(traits):
            factor = self._of.get(trait)
            if factor is not None:
                found = [rate * times for rate, times in zip(found, factor, strict=True)]
        return found


def _fit_trait(trait: int, every: Sequence[Seen], factors: dict[_Trait, list[float]]) -> Iterator[None]:
    """Adds the trait's factors, and multiplies the rates by them."""
    uses: dict[int, list[float]] = {}
    expected: dict[int, list[float]] = {}
    for count, seen in enumerate(every):
        value = seen.kind[trait]
        hoped = [time * rate for time, rate in zip(seen.spent, seen.rates, strict=True)]
        uses[value] = _sum(uses.get(value), seen.uses)
        expected[value] = _sum(expected.get(value), hoped)
        if count % _LONG_STRIDE == 0:
            yield
    for value, counts in uses.items():
        factors[trait, value] = _factor(counts, expected[value])
    for count, seen in enumerate(every):
        factor = factors[trait, seen.kind[trait]]
        seen.rates = [rate * times for rate, times in zip(seen.rates, factor, strict=True)]
        if count % _LONG_STRIDE == 0:
            yield


def _factor(uses: Sequence[float], expected: Sequence[float]) -> list[float]:
    """By age, over a bucket and its neighbours; near the factor of all ages where little was seen."""
    known = (sum(uses) + _DOUBT) / (sum(expected) + _DOUBT)
    return [
        (seen + _DOUBT * known) / (hoped + _DOUBT)
        for seen, hoped in zip(_around(uses), _around(expected), strict=True)
    ]


def _around(counts: Sequence[float]) -> Iterator[float]:
    wide = [0.0, *counts, 0.0]
    return (a + b + c for a, b, c in zip(wide, wide[1:], wide[2:], strict=False))


def _sum(first: list[float] | None, second: Sequence[float]) -> list[float]:
    return list(second) if first is None else [a + b for a, b in zip(first, second, strict=True)]
