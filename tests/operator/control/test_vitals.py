"""A background task that does not do its work is told by /healthz and /readyz; watches that end, end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import kopf
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvist_operator.app import operating
from kvist_operator.control.errors import ApiError, Forbidden, NotFound, Unavailable
from kvist_operator.control.metrics import Metrics
from kvist_operator.control.supervise import Supervisor
from kvist_operator.control.testing.fake_api import FakeApi
from kvist_operator.control.vitals import UNHEALTHY_SECONDS, UNREADY_SECONDS, Vitals
from kvist_operator.control.watch import Watches
from kvist_operator.settings import OperatorSettings

World = Any


@pytest.fixture
def vitals(world: World) -> Vitals:
    return Vitals(world.clock)


def test_a_task_that_fails_for_long_makes_the_process_unready_then_unhealthy(
    world: World, vitals: Vitals
) -> None:
    vitals.failed("sweep", Forbidden("no right", 403))
    assert vitals.problem() == vitals.unready() == ""
    world.clock.seconds += UNREADY_SECONDS
    vitals.failed("sweep", Forbidden("no right", 403))
    assert vitals.unready() == f"sweep has failed for {UNREADY_SECONDS:.0f} s: no right"
    assert vitals.problem() == ""
    world.clock.seconds += UNHEALTHY_SECONDS
    assert "no right" in vitals.problem()
    vitals.well("sweep")
    assert vitals.problem() == vitals.unready() == ""


def test_a_new_process_is_no_remedy_for_a_server_that_is_away(world: World, vitals: Vitals) -> None:
    vitals.failed("sweep", Unavailable("down"))
    world.clock.seconds += 10 * UNHEALTHY_SECONDS
    assert vitals.problem() == ""
    assert "down" in vitals.unready()


async def test_a_task_that_is_dead_makes_the_process_unhealthy(vitals: Vitals) -> None:
    registry = CollectorRegistry()
    supervisor = Supervisor(Metrics(registry), vitals)
    task, other = supervisor.start("watches", asyncio.Event().wait), supervisor.start("sweep", _fails)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert vitals.problem() == "watches ended"
    await supervisor.stop(task, other)
    assert vitals.problem() == ""
    assert 'kvist_operator_task_failures_total{task="sweep"} 1.0' in generate_latest(registry).decode()


async def _fails() -> None:
    raise KeyError("sweep")


async def test_health_checks_tell_of_background_tasks(world: World) -> None:
    settings = OperatorSettings(host="127.0.0.1", port=0, namespace="kvist", identity="me")
    async with (
        operating(settings, world.server, world.programs) as operator,
        aiohttp.ClientSession() as session,
    ):
        task = operator.supervisor.start("watches", _fails)
        async with asyncio.timeout(60):
            while operator.unready():  # noqa: ASYNC110 - the first look at the lease is no event
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        for path in ("healthz", "readyz"):
            answer = await session.get(f"http://127.0.0.1:{operator.port}/{path}")
            assert (answer.status, await answer.json()) == (503, {"status": "watches ended"})


class Kopf:
    """In kopf's place: waits for the flag on a thread of its loop, as kopf does, and ends when told."""

    def __init__(self) -> None:
        self.namespaces: list[tuple[str, ...]] = []
        self.started = asyncio.Event()
        self.home = asyncio.get_running_loop()
        self.end = threading.Event()
        self.error: Exception | None = None

    async def operator(self, *, namespaces: tuple[str, ...], stop_flag: threading.Event, **_: Any) -> None:
        self.namespaces.append(namespaces)
        waiter = asyncio.get_running_loop().run_in_executor(None, stop_flag.wait)
        self.home.call_soon_threadsafe(self.started.set)
        over = asyncio.get_running_loop().run_in_executor(None, self.end.wait)
        await asyncio.wait({waiter, over}, return_when=asyncio.FIRST_COMPLETED)
        self.end.set()
        if self.error is not None:
            raise self.error


class Namespaces(FakeApi):
    """Some may not be listed."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str | None, ApiError] = {}

    async def list(self, resource: Any, namespace: str | None, *more: Any, **others: Any) -> Any:
        if namespace in self.refused:
            raise self.refused[namespace]
        return await super().list(resource, namespace, *more, **others)


@asynccontextmanager
async def watching(api: Namespaces, *namespaces: str) -> AsyncIterator[tuple[Kopf, asyncio.Task[None]]]:
    fake = Kopf()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kopf, "operator", fake.operator)
        watches = Watches(api, lambda: kopf.ConnectionInfo(server="x"), lambda key, delay: None, namespaces)
        task = asyncio.create_task(watches.run())
        async with asyncio.timeout(60):
            yield fake, task


@pytest.mark.parametrize("error", [None, PermissionError("403 for 70 s")])
async def test_watches_that_end_by_themselves_are_noticed_at_once(error: Exception | None) -> None:
    async with watching(Namespaces()) as (fake, task):
        fake.error = error
        await fake.started.wait()
        fake.end.set()
        with pytest.raises(PermissionError if error else RuntimeError):
            await task


async def test_watches_end_when_they_are_told() -> None:
    async with watching(Namespaces()) as (fake, task):
        await fake.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fake.end.is_set()


async def test_a_namespace_that_may_not_be_listed_is_left_out_of_the_watches() -> None:
    api = Namespaces()
    api.refused["gone"] = Forbidden("no right in gone", 403)
    async with watching(api, "gone", "team") as (fake, task):
        await fake.started.wait()
        assert fake.namespaces == [("team",)]
        task.cancel()
        await asyncio.wait({task})


async def test_a_namespace_that_comes_back_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvist_operator.control.watch.AGAIN_SECONDS", 0.01)
    api = Namespaces()
    api.refused["gone"] = Forbidden("no right in gone", 403)
    async with watching(api, "gone", "team") as (fake, task):
        await fake.started.wait()
        del api.refused["gone"]
        await task  # ends without an error: the supervisor starts it again


async def test_without_any_namespace_to_watch_the_reason_is_told() -> None:
    api = Namespaces()
    api.refused["gone"] = NotFound("gone", 404)
    async with watching(api, "gone") as (_, task):
        with pytest.raises(NotFound):
            await task
