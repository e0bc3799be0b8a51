"""The speed of a tier is found in a few batches, and what was found is not believed for ever."""

import pytest

from kvist_connector.agent.speed import Speed
from kvist_connector.planner import TierPrice


class Link:
    """A tier behind a link, and a clock that stands still unless it is moved."""

    def __init__(self):
        self.now = 0.0
        self.speed = Speed(TierPrice(latency=0.002, bandwidth=500e6), clock=lambda: self.now)

    def reads(self, batches, bandwidth, size=6_000_000):
        for _ in range(batches):
            self.speed.observe(size, 0.002 + size / bandwidth)

    @property
    def bandwidth(self):
        return self.speed.price.bandwidth


@pytest.mark.parametrize("bandwidth", [1e6, 20e6, 5e9])
def test_a_speed_is_found_in_a_few_batches(bandwidth):
    link = Link()
    link.reads(6, bandwidth)
    assert link.bandwidth == pytest.approx(bandwidth, rel=0.2 if bandwidth < 500e6 else 1)


def test_a_link_that_became_slow_is_believed_at_once():
    link = Link()
    link.reads(20, 1e9)
    link.reads(3, 2e6)
    assert link.bandwidth < 4e6


def test_a_tier_that_nobody_reads_is_due_to_be_measured_now_and_then():
    link = Link()
    assert not link.speed.due()
    link.now += 31
    assert link.speed.due()
    assert not link.speed.due()
    link.now += 29
    link.reads(1, 1e9)
    link.now += 29
    assert not link.speed.due()


def test_measuring_a_slow_tier_takes_little_of_its_time():
    link = Link()
    link.reads(1, 1e6)  # six seconds
    link.now += 110
    assert not link.speed.due()
    link.now += 20
    assert link.speed.due()


def test_empty_batches_say_nothing():
    link = Link()
    link.speed.observe(0, 5.0)
    assert link.bandwidth == pytest.approx(500e6)
