"""Load or recompute: the plan is the best of all prefixes, by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.planner import PrefillModel, TierPrice, plan_load

PRICES = st.builds(TierPrice, latency=st.floats(0, 1), bandwidth=st.floats(1e3, 1e9))
SIZES = st.lists(st.tuples(PRICES, st.integers(0, 10**6)), max_size=8)


def naive(sizes, prefill, tokens, start):
    best, best_gain = 0, 0.0
    for n in range(1, len(sizes) + 1):
        load = 0.0
        for price in {price for price, _ in sizes[:n]}:
            load += price.seconds(sum(size for other, size in sizes[:n] if other == price))
        gain = prefill.seconds(start * tokens, (start + n) * tokens) - load
        if gain > best_gain + 1e-12:
            best, best_gain = n, gain
    return best_gain, best


@given(sizes=SIZES, linear=st.floats(1e-7, 1e-2), quadratic=st.floats(0, 1e-6), start=st.integers(0, 5))
def test_the_plan_is_the_best_prefix(sizes, linear, quadratic, start):
    prefill = PrefillModel(linear, quadratic)
    plan = plan_load(sizes, prefill, 256, start)
    gain, _ = naive(sizes, prefill, 256, start)
    assert plan.saved_seconds - plan.load_seconds == pytest.approx(gain, abs=1e-9)
    assert 0 <= plan.chunks <= len(sizes)


def test_without_a_measured_prefill_everything_is_loaded():
    sizes = [(TierPrice(1.0, 1.0), 100)] * 3
    assert plan_load(sizes, None, 256).chunks == 3
    assert plan_load(sizes, PrefillModel(0.0), 256).chunks == 3
    assert plan_load([], None, 256).chunks == 0


def test_a_slow_tier_is_left_alone():
    plan = plan_load([(TierPrice(10.0, 1e6), 10**6)], PrefillModel(1e-4), 256)
    assert plan.chunks == 0
    assert plan.reason == "recomputing is faster"


def test_later_tokens_cost_more():
    prefill = PrefillModel(1e-4, 1e-8)
    assert prefill.seconds(4096, 4352) > prefill.seconds(0, 256)
    assert prefill.seconds(10, 10) == prefill.seconds(10, 5) == 0.0
    assert TierPrice(1.0, 0.0).seconds(1) == float("inf")
    assert TierPrice(1.0, 0.0).seconds(0) == 0.0
