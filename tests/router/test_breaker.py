"""The breaker of a replica: opens after failures in a row, is tried by one request at a time."""

from __future__ import annotations

import pytest
from aiohttp import web

from kvist_router.mind.breaker import LONGEST_PAUSE, Breaker
from kvist_router.mind.interface import Report
from kvist_router.testing.engine import FakeEngine

FAILED, FIRST, ENDED, CANCELLED = Report("failed"), Report("first_byte"), Report("ended"), Report("cancelled")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def opened() -> Breaker:
    breaker = Breaker(failures=2, pause=5)
    for name in "ab":
        breaker.sent(name)
        breaker.report(name, FAILED, 0.0)
    return breaker


def half_open() -> Breaker:
    breaker = opened()
    breaker.tick(5.0)
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(failures=2, pause=5)
    for _ in range(3):
        breaker.report("a", FAILED, 0.0)
        breaker.report("b", ENDED, 0.0)
    assert breaker.takes
    assert not opened().takes


def test_answers_that_begin_and_never_end_open_it_too() -> None:
    breaker = Breaker(failures=2, pause=5)
    for name in "ab":
        breaker.report(name, FIRST, 0.0)
        breaker.report(name, FAILED, 0.0)
    assert breaker.state == "open"


def test_after_the_pause_one_request_tries() -> None:
    breaker = opened()
    breaker.tick(4.9)
    assert (breaker.takes, breaker.state) == (False, "open")
    breaker.tick(5.0)
    assert (breaker.takes, breaker.state) == (True, "half-open")
    breaker.sent("probe")
    assert not breaker.takes
    breaker.report("old", FIRST, 6.0)  # was sent before it opened
    assert not breaker.takes
    breaker.report("probe", FIRST, 6.0)
    assert (breaker.takes, breaker.state) == (True, "closed")


def test_a_probe_that_fails_doubles_the_pause_and_one_that_leaves_makes_room() -> None:
    breaker = half_open()
    breaker.sent("leaves")
    breaker.report("leaves", CANCELLED, 5.0)
    assert breaker.takes
    now, pauses = 5.0, []
    for number in range(6):
        breaker.sent(str(number))
        breaker.report(str(number), FAILED, now)
        begun = now
        while not breaker.takes:
            now += 1.0
            breaker.tick(now)
        pauses.append(now - begun)
    assert pauses == [10, 20, 40, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]


def test_an_engine_that_came_back_begins_anew() -> None:
    breaker = half_open()
    breaker.sent("a")
    breaker.reset()
    assert (breaker.takes, breaker.state) == (True, "closed")
    breaker.report("b", FAILED, 9.0)
    assert breaker.takes


async def test_an_engine_that_passes_checks_and_fails_requests_gets_no_more(router, http, until) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500)

    health = {"interval_seconds": 0.05, "timeout_seconds": 60, "breaker_failures": 2, "breaker_seconds": 0.01}
    async with FakeEngine() as bad, FakeEngine() as good:
        bad.answer = broken
        running = await router(
            replicas=[{"name": "bad", "url": bad.url}, {"name": "good", "url": good.url}],
            policy="round-robin",
            health=health | {"breaker_seconds": 3600},
        )
        for _ in range(10):
            async with http.post(running.url + "/v1/chat/completions", json=CHAT) as answer:
                assert answer.status == 200
        assert len(bad.received) == 2
        assert running.mind.replicas["bad"].healthy
        async with http.get(running.admin_url + "/v1/kvist/replicas") as answer:
            states = {item["name"]: item["breaker"] for item in (await answer.json())["replicas"]}
        assert states == {"bad": "open", "good": "closed"}


async def test_the_only_replica_is_tried_whatever_its_breaker_says(router, http) -> None:
    failing = True

    async def sometimes(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500 if failing else 200, text="{}")

    async with FakeEngine() as engine:
        engine.answer = sometimes
        running = await router(replicas=[{"name": "r", "url": engine.url}])
        for _ in range(7):
            async with http.post(running.url + "/v1/chat/completions", json=CHAT) as answer:
                assert answer.status == 500
        assert running.mind.replicas["r"].breaker.state != "closed"
        failing = False
        async with http.post(running.url + "/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_what_is_the_clients_fault_does_not_count(router, http, status) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status)

    async with FakeEngine() as engine:
        engine.answer = refuse
        running = await router(replicas=[{"name": "r", "url": engine.url}])
        for _ in range(6):
            async with http.post(running.url + "/v1/chat/completions", json=CHAT) as answer:
                assert answer.status == status
        assert running.mind.replicas["r"].breaker.state == "closed"
