"""The work queue: each key once, never twice at a time, failures back off, bounded."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist_operator.control.queue import Backoff, WorkQueue

KEYS = st.integers(min_value=0, max_value=5)


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class QueueMachine(RuleBasedStateMachine):
    """Against the plainest model: a dictionary of due times and a set of keys being worked on."""

    def __init__(self) -> None:
        super().__init__()
        self.time = Time()
        self.queue: WorkQueue[int] = WorkQueue(4, Backoff(1.0, 8.0), self.time, Random(0))
        self.due: dict[int, float] = {}
        self.working: set[int] = set()

    @rule(key=KEYS, delay=st.sampled_from([0.0, 0.5, 3.0]))
    def add(self, key: int, delay: float) -> None:
        taken = self.queue.add(key, delay)
        assert taken == (key in self.due or len(self.due) < 4)
        if taken:
            self.due[key] = min(self.due.get(key, float("inf")), self.time.now + delay)

    @rule(seconds=st.sampled_from([0.5, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.time.now += seconds

    @rule()
    def take(self) -> None:
        found = self.queue.take()
        ready = {
            key: due for key, due in self.due.items() if due <= self.time.now and key not in self.working
        }
        if not ready:
            assert found is None
            return
        assert found is not None
        assert ready[found] == min(ready.values())
        del self.due[found]
        self.working.add(found)

    @precondition(lambda self: self.working)
    @rule(failed=st.booleans())
    def done(self, failed: bool) -> None:
        key = min(self.working)
        self.working.discard(key)
        pause = self.queue.done(key, failed=failed)
        assert (pause is not None) == failed
        if pause is not None and (key in self.due or len(self.due) < 4):
            assert 0 < pause <= 8.0
            self.due[key] = min(self.due.get(key, float("inf")), self.time.now + pause)

    @rule(key=KEYS)
    def forget(self, key: int) -> None:
        self.queue.forget(key)
        self.due.pop(key, None)

    @invariant()
    def as_long_as_the_model(self) -> None:
        assert len(self.queue) == len(self.due) <= 4


TestQueue = QueueMachine.TestCase


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_grow_to_a_limit(failures: int, jitter: float) -> None:
    backoff = Backoff(0.5, 120.0)
    assert 0.4 <= backoff.pause(failures, jitter) <= 120.0
    assert backoff.pause(failures + 1, 0.0) >= backoff.pause(failures, 0.0)


async def test_a_waiting_worker_wakes_up_for_a_new_key() -> None:
    queue: WorkQueue[str] = WorkQueue(10, Backoff())
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a", 3600.0)
    await asyncio.sleep(0)
    assert not worker.done()
    queue.add("a")
    async with asyncio.timeout(30):
        assert await worker == "a"


async def test_a_key_added_during_its_work_comes_again_after_it() -> None:
    queue: WorkQueue[str] = WorkQueue(10, Backoff())
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not worker.done()
    queue.done("a")
    async with asyncio.timeout(30):
        assert await worker == "a"


async def test_a_success_ends_the_back_off() -> None:
    time = Time()
    queue: WorkQueue[str] = WorkQueue(10, Backoff(1.0, 100.0), time, Random(1))
    pauses = []
    for failed in (True, True, True, False, True):
        queue.add("a")
        time.now += 1000
        assert queue.take() == "a"
        pauses.append(queue.done("a", failed=failed))
    assert pauses[3] is None
    assert pauses[2] is not None
    assert pauses[4] is not None
    assert pauses[2] > 3 * pauses[4]


def test_a_full_queue_refuses_and_counts() -> None:
    queue: WorkQueue[int] = WorkQueue(2, Backoff(), Time())
    assert [queue.add(key) for key in (1, 2, 3, 1)] == [True, True, False, True]
    assert queue.refused == 1


@pytest.mark.parametrize("adds", [100_000])
def test_a_key_added_over_and_over_takes_no_room(adds: int) -> None:
    time = Time()
    queue: WorkQueue[str] = WorkQueue(10, Backoff(), time)
    for count in range(adds):
        queue.add("a", float(adds - count))
    assert len(queue) == 1
    assert len(queue._heap) < 200
