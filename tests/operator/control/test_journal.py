"""Events: the same one is written seldom, continued by whoever comes next, and never in the way."""

from __future__ import annotations

from typing import Any

from kvist_operator.control.counted import CountedApi
from kvist_operator.control.errors import Unavailable
from kvist_operator.control.journal import Journal
from kvist_operator.control.resources import EVENTS

World = Any


def journal(world: World) -> tuple[Journal, CountedApi]:
    api = CountedApi(world.server)
    return Journal(api, world.clock, world.clock.now), api


async def test_an_event_that_repeats_is_written_once_in_ten_minutes_with_its_count(world: World) -> None:
    cluster = world.apply()
    found, api = journal(world)
    for _ in range(50):
        await found.tell(cluster, "Evicted", "demo-engine-1 is replaced")
    assert sum(api.writes().values()) == 1
    world.clock.seconds += 600
    await found.tell(cluster, "Evicted", "demo-engine-1 is replaced")
    (event,) = world.server.all(EVENTS)
    assert (event["count"], event["type"]) == (51, "Normal")
    assert event["involvedObject"]["uid"] == cluster["metadata"]["uid"]


async def test_another_operator_continues_the_event_and_other_words_are_another_event(world: World) -> None:
    cluster = world.apply()
    for _ in range(2):
        found, _ = journal(world)
        await found.tell(cluster, "Stalled", "demo-engine-1: x", warning=True)
    await found.tell(cluster, "Stalled", "demo-engine-2: x", warning=True)
    assert sorted(event["count"] for event in world.server.all(EVENTS)) == [1, 2]


async def test_an_event_that_cannot_be_written_harms_nothing(world: World) -> None:
    cluster = world.apply()
    found, _ = journal(world)
    world.server.fail = [Unavailable("down")]
    await found.tell(cluster, "Scaled", "1 to 2 engines")
    assert world.server.all(EVENTS) == []
