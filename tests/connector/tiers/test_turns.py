"""Whoever waits for its turn has it in rounds, however much others want, and no turn is lost."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_connector.tiers.turns import WORKING_FOR, Turns

WAIT = 60


class Hall:
    """Calls for several, each of which holds its turn until it is told to end."""

    def __init__(self, most):
        self.turns = Turns(most)
        self.order = []
        self.inside = []

    def call(self, whom):
        return asyncio.create_task(self._call(whom))

    async def _call(self, whom):
        WORKING_FOR.set(whom)
        async with self.turns:
            end = asyncio.Event()
            self.order.append(whom)
            self.inside.append(end)
            await end.wait()

    async def one_ends(self):
        if self.inside:
            self.inside.pop(0).set()
        await self.settle()

    async def settle(self):
        """Every task has gone as far as it can: each turn that is given takes a few rounds of the loop."""
        for _ in range(8):
            await asyncio.sleep(0)


@given(st.lists(st.integers(1, 12), min_size=2, max_size=5), st.integers(1, 4))
@settings(max_examples=50)
def test_each_has_one_turn_before_any_has_two(wanted, most):
    async def play():
        hall = Hall(most)
        tasks = [hall.call(whom) for whom, count in enumerate(wanted) for _ in range(count)]
        await hall.settle()
        left = dict(enumerate(wanted))
        for whom in hall.order:  # those who came while there was room
            left[whom] -= 1
        begun = len(hall.order)
        while not all(task.done() for task in tasks):
            await hall.one_ends()
        served = hall.order[begun:]
        for position, whom in enumerate(served):
            rest = served[position + 1 :]
            if whom in rest:
                between = set(rest[: rest.index(whom)])
                assert between >= {other for other in set(rest) if other != whom and left[other]}
            left[whom] -= 1
        assert not any(left.values())
        async with asyncio.timeout(WAIT):
            for _ in range(most):
                await hall.turns.take()  # all are free again

    asyncio.run(play())


async def test_who_comes_with_little_is_not_behind_all_of_another():
    hall = Hall(1)
    many = [hall.call("many") for _ in range(20)]
    await hall.settle()
    few = [hall.call("few") for _ in range(2)]
    await hall.settle()
    while not all(task.done() for task in few):
        await hall.one_ends()
    assert hall.order.count("many") <= 4
    while not all(task.done() for task in many):
        await hall.one_ends()


async def test_who_gives_up_loses_no_turn_and_who_is_refused_has_none():
    turns = Turns(1)
    await turns.take()
    given_up, refused = (asyncio.create_task(turns.take()) for _ in range(2))
    await asyncio.wait([given_up], timeout=0)
    given_up.cancel()
    await asyncio.wait([given_up])
    turns.refuse(lambda: ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await refused
    last = asyncio.create_task(turns.take())
    await asyncio.wait([last], timeout=0)
    turns.give()
    last.cancel()  # it has the turn already, and hands it on
    await asyncio.wait([last])
    async with asyncio.timeout(WAIT):
        await turns.take()
