"""The prefill meter finds the engine's own speed and follows its changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_connector.engines.vllm.prefill_meter import MIN_STEP_TOKENS, WARM_UP, PrefillMeter
from kvist_connector.planner import PrefillModel


def prefill(meter, truth, steps, size=256, start=0):
    """A long prompt in steps of `size` tokens."""
    for number in range(steps):
        span = (start + number * size, start + (number + 1) * size)
        meter.observe([span], truth.seconds(*span))


def warmed():
    meter = PrefillMeter()
    for _ in range(WARM_UP):
        meter.observe([(0, 256)], 100.0)
    return meter


def test_nothing_is_said_before_something_was_measured():
    assert PrefillMeter().model() is None
    assert warmed().model() is None  # the first steps allocate and compile


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(0.0, 1e-8))
def test_both_terms_are_found(linear, quadratic):
    meter, truth = warmed(), PrefillModel(linear, quadratic)
    prefill(meter, truth, 40)
    found = meter.model()
    assert found.seconds(0, 6000) == pytest.approx(truth.seconds(0, 6000), rel=1e-3)
    assert found.seconds(5000, 6000) == pytest.approx(truth.seconds(5000, 6000), rel=1e-2)


def test_a_slower_engine_is_followed():
    meter = warmed()
    prefill(meter, PrefillModel(1e-3), 40)
    prefill(meter, PrefillModel(2e-3), 400)
    assert meter.model().seconds(0, 1000) == pytest.approx(2.0, rel=0.05)


def test_one_pause_of_the_machine_is_not_believed():
    meter = warmed()
    prefill(meter, PrefillModel(1e-3), 40)
    meter.observe([(0, 256)], 60.0)
    assert meter.model().seconds(0, 256) < 2 * 0.256


@pytest.mark.parametrize(
    ("spans", "seconds"), [([(0, MIN_STEP_TOKENS - 1)], 1.0), ([], 1.0), ([(0, 256)], 0.0), ([(0, 256)], -1)]
)
def test_steps_that_say_nothing_are_left_out(spans, seconds):
    meter = warmed()
    meter.observe(spans, seconds)
    assert meter.model() is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 512), st.floats(1e-6, 10)), max_size=60))
def test_terms_are_never_negative(steps):
    meter = PrefillMeter()
    for start, size, seconds in steps:
        meter.observe([(start, start + size)], seconds)
    found = meter.model()
    assert found is None or (found.linear > 0 and found.quadratic >= 0)
