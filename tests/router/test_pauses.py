"""What failed is tried again after growing pauses, which differ between those that failed together."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvist_router.pauses import Pauses

SECONDS = st.floats(0.001, 100)


@given(SECONDS, st.floats(1, 1000), st.integers(0, 2**32), st.integers(1, 40))
def test_pauses_double_up_to_the_longest(first: float, times: float, seed: int, count: int) -> None:
    pauses = Pauses(first, first * times, Random(seed))
    for number in range(count):
        whole = min(first * 2.0**number, first * times)
        assert 0.5 * whole <= pauses.next() <= whole


def test_after_what_worked_the_next_is_the_shortest() -> None:
    pauses = Pauses(1.0, 64.0, Random(1))
    for _ in range(5):
        pauses.next()
    pauses.anew()
    assert 0.5 <= pauses.next() <= 1.0 < pauses.next() <= 2.0


def test_two_that_failed_together_do_not_come_back_together() -> None:
    one, other = (Pauses(1.0, 1.0, Random(seed)) for seed in (1, 2))
    assert one.next() != other.next()
