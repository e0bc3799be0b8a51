"""When a lower tier has a problem, and how its return is noticed while nobody uses it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from obstore.store import MemoryStore

from kvist_connector.agent.answering import LONGEST_SECONDS, Answering
from kvist_connector.errors import TierError
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.envelope import EnvelopeStore
from kvist_connector.tiers.faulty import FaultyStore
from kvist_connector.tiers.object_store import ObjectStore
from kvist_connector.tiers.spread import SpreadStore

DEADLINE = 20.0


class Clock:
    """Pauses end when the test says so."""

    def __init__(self):
        self.pauses = asyncio.Queue()

    async def sleep(self, seconds):
        over = asyncio.Event()
        await self.pauses.put((seconds, over))
        await over.wait()

    async def next(self):
        """The pause that begins; it is over once `set`."""
        async with asyncio.timeout(DEADLINE):
            return await self.pauses.get()

    async def pass_by(self):
        """The present pause ends, and what follows it is done."""
        seconds, over = await self.next()
        over.set()
        return seconds


@pytest.fixture
def stores():
    """Two servers that fail when told to."""
    with ThreadPoolExecutor(1) as threads:
        yield [FaultyStore(ObjectStore(MemoryStore(), name, threads)) for name in "ab"]


@pytest.fixture
async def watched(stores):
    made = []

    def begin(store):
        made.append(Answering(EnvelopeStore(store, None), clock.sleep))
        return made[-1], clock

    clock = Clock()
    yield begin
    for answering in made:
        await answering.close()


def down(operation, key):
    return TierError("down")


def well(operation, key):
    return None


async def until(check):
    """Other tasks go on until it is so."""
    async with asyncio.timeout(DEADLINE):
        while not check():
            await turn()


async def turn():
    await asyncio.sleep(0)


async def test_one_failure_is_no_problem_and_the_question_after_it_settles_it(watched, stores):
    answering, clock = watched(stores[0])
    answering.failed(TierError("slow"))
    assert not answering.problem
    await clock.pass_by()
    await until(lambda: not answering.asking)
    # It answered, so three more are needed.
    stores[0].plan = down
    for _ in range(2):
        answering.failed(TierError("slow"))
    assert not answering.problem


async def test_a_tier_that_nobody_uses_is_known_to_be_lost_and_to_be_back(watched, stores):
    answering, clock = watched(stores[0])
    stores[0].plan = down
    answering.failed(TierError("slow"))
    pauses = [await clock.pass_by() for _ in range(8)]
    seconds, over = await clock.next()
    assert answering.problem == "down"
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[1] < seconds == LONGEST_SECONDS
    stores[0].plan = well
    over.set()
    await until(lambda: not answering.problem)
    await until(lambda: not answering.asking)
    assert clock.pauses.empty()


async def test_failures_at_the_very_end_of_asking_are_asked_about_too(watched, stores):
    answering, clock = watched(stores[0])
    loop, probe = asyncio.get_running_loop(), stores[0].probe

    def fail():
        assert answering.asking
        for _ in range(3):
            answering.failed(TierError("slow"))

    async def last():
        await probe()
        loop.call_soon(fail)  # after this question has ended, before anybody could note it
        stores[0].probe = probe

    stores[0].probe = last
    answering.failed(TierError("slow"))
    await clock.pass_by()
    await clock.pass_by()
    await until(lambda: not answering.problem)
    await until(lambda: not answering.asking)


async def test_doubt_is_no_failure_and_is_settled_by_asking(watched, stores):
    answering, clock = watched(stores[0])
    for _ in range(5):
        answering.doubted()
    assert not answering.problem
    told = asyncio.create_task(answering.asked())
    await clock.pass_by()
    await asyncio.wait_for(told, DEADLINE)
    await until(lambda: not answering.asking)
    await answering.asked()  # nothing is being asked


async def test_whoever_waits_is_told_after_every_question(watched, stores):
    answering, clock = watched(stores[0])
    stores[0].plan = down
    answering.doubted()
    for failures in range(1, 5):
        told = asyncio.create_task(answering.asked())
        await clock.pass_by()
        await asyncio.wait_for(told, DEADLINE)
        assert bool(answering.problem) == (failures >= 3)


async def test_a_success_in_between_begins_the_count_anew(watched, stores):
    answering, _ = watched(stores[0])
    for _ in range(2):
        answering.failed(TierError("slow"))
        answering.failed(TierError("slow"))
        answering.worked()
    assert not answering.problem


async def test_one_lost_server_of_two_is_a_problem_though_the_other_answers(watched, stores):
    now = [0.0]
    guarded = [DeadlineStore(store, 30, failures=3, pause=5, clock=lambda: now[0]) for store in stores]
    answering, clock = watched(SpreadStore(dict(zip("ab", guarded, strict=True))))
    stores[1].plan = down
    answering.failed(TierError("down"))
    for _ in range(3):
        await clock.pass_by()
    _, over = await clock.next()
    answering.worked()  # by the other server
    assert answering.problem == "down"
    stores[1].plan = well
    now[0] = 6.0
    over.set()
    await until(lambda: not answering.problem)


async def test_no_question_outlives_the_tier(stores):
    clock = Clock()
    answering = Answering(EnvelopeStore(stores[0], None), clock.sleep)
    answering.failed(TierError("slow"))
    _, over = await clock.next()
    await answering.close()
    over.set()
    answering.failed(TierError("a deletion that was under way"))
    assert not answering.asking
    await asyncio.sleep(0)
    assert not stores[0].calls
