"""What finds work: the sweep, the router poll; and what does it: workers, election, the whole operator."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvist_operator.app import operating
from kvist_operator.control.api import Key
from kvist_operator.control.errors import Forbidden, NotFound, NotLeader, Unavailable
from kvist_operator.control.metrics import Metrics
from kvist_operator.control.poll import RouterPoll
from kvist_operator.control.queue import Backoff, WorkQueue
from kvist_operator.control.reconcile import Outcome
from kvist_operator.control.resources import CLUSTERS, DEPLOYMENTS, LEASES
from kvist_operator.control.sweep import Sweep
from kvist_operator.control.views import Figures
from kvist_operator.control.workers import Workers
from kvist_operator.settings import OperatorSettings

World = Any


async def test_the_sweep_adds_every_cluster_first_and_then_what_changed(world: World) -> None:
    world.apply()
    other = {"metadata": {"name": "other", "namespace": "elsewhere"}, "spec": {"model": {"name": "m"}}}
    world.server.put(CLUSTERS, other)
    await world.settle()
    added: list[Key] = []
    sweep = Sweep(world.api, added.append, [None])
    assert await sweep.turn(frozenset()) == 2
    assert set(added) == {Key("team", "demo"), Key("elsewhere", "other")}
    added.clear()
    assert await sweep.turn(frozenset()) == 0
    world.server.remove(DEPLOYMENTS, "team", "demo-router")
    assert await sweep.turn(frozenset()) == 1
    assert added == [Key("team", "demo")]
    world.server.remove(CLUSTERS, "elsewhere", "other")
    added.clear()
    await sweep.turn(frozenset())
    assert added == [Key("elsewhere", "other")]


async def test_the_sweep_of_named_namespaces_looks_nowhere_else(world: World) -> None:
    world.apply()
    sweep = Sweep(world.api, lambda key: None, ["elsewhere"])
    assert await sweep.turn(frozenset()) == 0


class Partly:
    """The fake API server, but some namespaces refuse to be listed."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.refused: dict[str | None, Exception] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    async def list(self, resource: Any, namespace: str | None, *more: Any) -> Any:
        if namespace in self.refused:
            raise self.refused[namespace]
        return await self.server.list(resource, namespace, *more)


async def test_a_namespace_that_is_gone_or_forbidden_stops_no_other(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.apply()
    api, added = Partly(world.server), list[Key]()
    api.refused["gone"] = Forbidden("cacheclusters is forbidden", 403)
    sweep = Sweep(api, added.append, ["gone", "team"])  # type: ignore[arg-type]
    assert await sweep.turn(frozenset()) == 1
    assert await sweep.turn(frozenset()) == 0
    assert added == [world.key]
    assert sweep.unlisted == 1
    assert [record.getMessage() for record in caplog.records] == [
        "namespace gone cannot be listed: cacheclusters is forbidden"
    ]
    other = {"metadata": {"name": "other", "namespace": "gone"}, "spec": {"model": {"name": "m"}}}
    world.server.put(CLUSTERS, other)
    del api.refused["gone"]
    assert await sweep.turn(frozenset()) == 1
    assert sweep.unlisted == 0


async def test_clusters_of_a_namespace_that_is_not_seen_for_a_while_are_not_gone(world: World) -> None:
    world.apply()
    api, added = Partly(world.server), list[Key]()
    sweep = Sweep(api, added.append, ["team", "other"])  # type: ignore[arg-type]
    await sweep.turn(frozenset())
    added.clear()
    api.refused["team"] = Unavailable("a moment")
    with pytest.raises(Unavailable):
        await sweep.turn(frozenset())
    del api.refused["team"]
    await sweep.turn(frozenset())
    assert added == []


async def test_a_sweep_that_can_list_nothing_fails(world: World) -> None:
    api = Partly(world.server)
    api.refused = {"a": Forbidden("no", 403), "b": NotFound("no", 404)}
    with pytest.raises(Forbidden):
        await Sweep(api, lambda key: None, ["a", "b"]).turn(frozenset())  # type: ignore[arg-type]


async def test_the_poll_notices_what_changes_no_object(world: World) -> None:
    world.apply()
    await world.settle()
    added: list[Key] = []
    poll = RouterPoll(world.programs, world.reconciler.known, added.append, world.clock)
    reads = sum(world.api.calls.values())
    await poll.turn()
    assert added == []
    world.programs.mirror = False
    await poll.turn()
    assert added == [world.key]
    assert sum(world.api.calls.values()) == reads


async def test_the_poll_adds_for_figures_once_a_minute_at_most(world: World) -> None:
    world.apply()
    await world.settle()
    added: list[Key] = []
    poll = RouterPoll(world.programs, world.reconciler.known, added.append, world.clock)
    world.programs.figures = Figures(10, 5, 1000, 500, 3)
    await poll.turn()
    assert added == []
    world.clock.seconds += 60
    await poll.turn()
    assert added == [world.key]


class Scripted:
    """A reconciler that does what the test says, and then waits for ever."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)
        self.unknown: list[Key] = []
        self.known: dict[Key, Any] = {}

    async def reconcile(self, key: Key) -> Outcome:
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        assert isinstance(step, Outcome)
        return step

    async def tell_unknown(self, key: Key) -> None:
        self.unknown.append(key)


def workers(
    reconciler: Any, queue: WorkQueue[Key], deadline: float = 60.0
) -> tuple[Workers, CollectorRegistry]:
    registry = CollectorRegistry()
    clock = asyncio.get_running_loop().time
    return Workers(queue, reconciler, Metrics(registry), clock, 2, deadline), registry


@pytest.mark.parametrize(
    ("step", "failed", "result"),
    [
        (Outcome(), False, "done"),
        (Unavailable("down"), True, "failed"),
        (NotLeader("lost"), False, "left"),
        (KeyError("unknown state"), True, "crashed"),
    ],
)
async def test_every_end_of_a_turn_is_counted_and_failures_are_tried_again(
    step: Any, failed: bool, result: str
) -> None:
    queue: WorkQueue[Key] = WorkQueue(10, Backoff())
    reconciler = Scripted(step)
    found, registry = workers(reconciler, queue)
    assert await found.turn(Key("a", "b")) == failed
    line = f'kvist_operator_reconciles_total{{result="{result}"}} 1.0'
    assert line in generate_latest(registry).decode()
    assert bool(reconciler.unknown) == (result == "crashed")


async def test_a_turn_without_end_is_ended_and_tried_again() -> None:
    class Hanging(Scripted):
        async def reconcile(self, key: Key) -> Outcome:
            await asyncio.Event().wait()
            raise AssertionError

    found, _ = workers(Hanging(), WorkQueue(10, Backoff()), deadline=0.01)
    assert await found.turn(Key("a", "b"))


async def test_workers_go_on_after_an_unknown_state_and_stop_when_told() -> None:
    queue: WorkQueue[Key] = WorkQueue(10, Backoff(0.001, 0.001))
    done = asyncio.Event()

    class Healing(Scripted):
        async def reconcile(self, key: Key) -> Outcome:
            if self.steps:
                return await super().reconcile(key)
            done.set()
            return Outcome(gone=True)

    found, _ = workers(Healing(KeyError("x"), Unavailable("y")), queue)
    found.lead()
    queue.add(Key("a", "b"))
    async with asyncio.timeout(60):
        await done.wait()
    assert found.problem == ""
    await found.stop()


def settings(**more: Any) -> OperatorSettings:
    return OperatorSettings(host="127.0.0.1", port=0, namespace="kvist", identity="me", **more)


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - the states of the fake server are no events
            await asyncio.sleep(0.01)


async def test_an_operator_takes_the_lease_works_answers_and_gives_it_back(world: World) -> None:
    world.apply()
    async with operating(settings(), world.server, world.programs) as operator:
        await until(lambda: world.server.all(DEPLOYMENTS))
        assert operator.problem() == operator.unready() == ""
        async with aiohttp.ClientSession() as session:
            for path in ("healthz", "readyz", "metrics"):
                answer = await session.get(f"http://127.0.0.1:{operator.port}/{path}")
                assert answer.status == 200
                text = await answer.text()
        assert "kvist_operator_leading 1.0" in text
        assert 'kvist_operator_api_calls_total{resource="statefulsets",verb="patch"}' in text
        (lease,) = world.server.all(LEASES)
        assert lease["spec"]["holderIdentity"] == "me"
    (lease,) = world.server.all(LEASES)
    assert lease["spec"]["holderIdentity"] == ""


async def test_an_operator_that_stands_by_writes_nothing(world: World) -> None:
    world.apply()
    held = {"holderIdentity": "other", "leaseDurationSeconds": 15}
    world.server.put(LEASES, {"metadata": {"name": "kvist-operator", "namespace": "kvist"}, "spec": held})
    async with operating(settings(), world.server, world.programs) as operator:
        await until(lambda: operator.unready() == "")
        operator.queue.add(world.key)
        assert not operator.elector.leading
    assert not operator.api.writes()


async def test_an_operator_without_its_api_server_is_not_ready(world: World) -> None:
    world.server.fail = [Unavailable("down")] * 1000

    class Down:
        def __getattr__(self, name: str) -> Any:
            async def refuse(*_: Any, **__: Any) -> Any:
                raise Unavailable("down")

            return refuse

    async with operating(settings(), Down(), world.programs) as operator:  # type: ignore[arg-type]
        assert operator.unready() != ""
        async with aiohttp.ClientSession() as session:
            answer = await session.get(f"http://127.0.0.1:{operator.port}/readyz")
            assert answer.status == 503
            assert (await session.get(f"http://127.0.0.1:{operator.port}/healthz")).status == 200
