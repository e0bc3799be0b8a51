"""The order in which waiting requests go on: priorities, and tenants in turns by tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvist_router.mind.admission.fair import QUANTUM, FairQueue, Waiting
from kvist_router.mind.admission.rates import Bucket


def waiting(
    tenant: str, cost: int = 100, priority: int = 0, weight: float = 1.0, item: Any = None
) -> Waiting[Any]:
    return Waiting(tenant, priority, weight, cost, item)


def drained(queue: FairQueue[Any], most: int = 10**6) -> list[Waiting[Any]]:
    found = []
    while len(found) < most and (item := queue.pop()) is not None:
        found.append(item)
    return found


def test_lower_numbers_go_first_and_one_tenant_in_order() -> None:
    queue: FairQueue[int] = FairQueue()
    for number, priority in enumerate((5, 0, -1, 0)):
        queue.push(waiting("a", priority=priority, item=number))
    assert [item.item for item in drained(queue)] == [2, 1, 3, 0]
    assert queue.pop() is None


def test_a_tenant_with_many_requests_does_not_hold_up_one_with_few() -> None:
    queue: FairQueue[None] = FairQueue()
    for _ in range(1000):
        queue.push(waiting("greedy", cost=QUANTUM))
    queue.push(waiting("modest", cost=QUANTUM))
    assert "modest" in [item.tenant for item in drained(queue, 3)]


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10), st.lists(st.integers(1, 100_000), min_size=30, max_size=60)),
        min_size=2,
        max_size=5,
    )
)
def test_while_all_wait_tokens_follow_the_weights(tenants) -> None:
    queue: FairQueue[None] = FairQueue()
    for number, (weight, costs) in enumerate(tenants):
        for cost in costs:
            queue.push(waiting(str(number), cost, weight=weight))
    got: Counter[str] = Counter()
    left = Counter({str(number): len(costs) for number, (_, costs) in enumerate(tenants)})
    while all(left.values()):
        item = queue.pop()
        assert item is not None
        got[item.tenant] += item.cost
        left[item.tenant] -= 1
    longest = max(cost for _, costs in tenants for cost in costs)
    shares = [got[str(number)] / weight for number, (weight, _) in enumerate(tenants)]
    slack = QUANTUM + longest / min(weight for weight, _ in tenants)
    assert max(shares) - min(shares) <= 2 * slack


@given(st.data())
def test_nobody_is_lost_or_served_twice(data) -> None:
    queue: FairQueue[int] = FairQueue()
    inside: dict[int, Waiting[int]] = {}
    for number in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["push", "push", "pop", "remove", "victim"]))
        new = waiting(
            data.draw(st.sampled_from("abc")), data.draw(st.integers(1, 99_999)), number % 3, item=number
        )
        if action == "push":
            queue.push(new)
            inside[number] = new
        elif action == "pop":
            found = queue.pop()
            assert (found is None) == (not inside)
            if found is not None:
                assert found.priority == min(item.priority for item in inside.values())
                del inside[found.item]
        elif action == "remove" and inside:
            gone = inside.pop(data.draw(st.sampled_from(sorted(inside))))
            queue.remove(gone)
            queue.remove(gone)
        elif action == "victim":
            found = queue.victim(new)
            last = max(item.priority for item in (new, *inside.values()))
            assert found.priority == last
            assert found is new or inside[found.item] is found
        assert len(queue) == len(inside) == len(list(queue))
    assert {item.item for item in drained(queue)} == set(inside)


def test_when_one_is_too_many_the_tenant_with_most_waiting_for_its_weight_pays() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(5):
        queue.push(waiting("greedy", item=f"g{number}"))
    queue.push(waiting("modest", cost=200))
    assert queue.victim(waiting("modest")).item == "g4"
    own = waiting("greedy")
    assert queue.victim(own) is own
    heavy = waiting("heavy", cost=600, weight=10)
    assert queue.victim(heavy).item == "g4"
    late = waiting("late", cost=1, priority=9)
    assert queue.victim(late) is late
    assert queue.victim(waiting("first", cost=10**6, priority=-9)).item == "g4"


def test_a_bucket_gives_a_minutes_worth_at_once_and_then_its_rate() -> None:
    bucket = Bucket(60, now=100.0)
    for _ in range(60):
        assert bucket.wait(100.0, 1) == 0
        bucket.take(1, 100.0)
    assert bucket.wait(100.0, 1) == 1.0
    assert bucket.wait(100.5, 1) == 0.5
    assert bucket.wait(101.0, 1) == 0
    assert bucket.wait(50.0, 1) == 0  # a clock that goes back gives nothing and takes nothing


def test_more_than_a_minutes_worth_is_served_once_and_paid_for_by_waiting() -> None:
    bucket = Bucket(600, now=0.0)
    assert bucket.wait(0.0, 1) == 0
    bucket.take(1200, 0.0)
    assert bucket.wait(0.0, 1) == 60.1
    assert bucket.wait(60.1, 1) == 0


def test_a_new_rate_keeps_what_was_taken() -> None:
    bucket = Bucket(60, now=0.0)
    bucket.take(60, 0.0)
    bucket.change(120, 0.0)
    assert bucket.wait(0.0, 60) == 0
    assert bucket.wait(0.0, 61) == 0.5
    half = Bucket(0.5, now=0.0)  # less than one a minute still lets one through
    assert half.wait(0.0, 1) == 0
