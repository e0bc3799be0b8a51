"""A configuration file that changes while the router runs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvist_connector.settings import validate
from kvist_router.app import Running, build
from kvist_router.reload import LIVE_LIMITS, ConfigFile, decide
from kvist_router.settings import LimitSettings, RouterSettings
from kvist_router.testing.engine import FakeEngine

URL = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class Configured:
    """A router and its file."""

    def __init__(self, file: Path, values: dict[str, Any]) -> None:
        self.file, self.values = file, values
        self.running: Running
        self.write({})

    def write(self, changes: dict[str, Any]) -> None:
        self.put(yaml.safe_dump(self.values | changes))

    def put(self, text: str) -> None:
        self.file.with_suffix(".new").write_text(text)
        self.file.with_suffix(".new").rename(self.file)

    def read(self) -> RouterSettings:
        return validate(RouterSettings, yaml.safe_load(self.file.read_text()))

    async def change(self, changes: dict[str, Any]) -> None:
        self.write(changes)
        assert self.running.reloader is not None
        await self.running.reloader.look()


@pytest.fixture
async def configured(tmp_path, until) -> AsyncIterator[Callable[..., Any]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(engine: FakeEngine, **values: Any) -> Configured:
            base = {"port": 0, "admin_port": 0, "replicas": [{"name": "r", "url": engine.url}]}
            found = Configured(tmp_path / "router.yaml", base | values)
            running = await stack.enter_async_context(build(found.read(), ConfigFile(found.file, found.read)))
            found.running = running
            task = asyncio.create_task(running.servers.run())
            stack.push_async_callback(_stop, running, task)
            await until(lambda: all(item.healthy for item in running.mind.replicas.values()))
            return found

        yield start


async def _stop(running: Running, task: asyncio.Task[None]) -> None:
    running.servers.stop()
    running.servers.stop()
    await task


async def status(http, url: str, **more: Any) -> int:
    async with http.post(url + URL, json=CHAT, **more) as answer:
        await answer.read()
        return int(answer.status)


async def test_keys_rates_and_limits_change_without_a_restart(configured, http, tmp_path) -> None:
    (tmp_path / "keys").write_text("sha256:" + hashlib.sha256(b"key").hexdigest())
    async with FakeEngine() as engine:
        found = await configured(engine)
        url = found.running.url
        assert await status(http, url) == 200
        await found.change({"auth": {"keys_file": str(tmp_path / "keys")}})
        assert await status(http, url) == 401
        assert await status(http, url, headers={"Authorization": "Bearer key"}) == 200
        await found.change({"tenant": {"others": {"requests_per_minute": 1}}})
        assert [await status(http, url) for _ in range(2)] == [200, 429]
        await found.change({"limits": {"body_bytes": 1024}, "policy": "round-robin"})
        async with http.post(url + URL, data=b"x" * 2048) as answer:
            assert answer.status == 413


async def test_a_request_that_waits_goes_on_when_the_limit_is_raised(configured, http, until) -> None:
    async with FakeEngine() as engine:
        engine.first_byte.clear()
        found = await configured(engine, admission={"per_replica": 1})
        tasks = [asyncio.create_task(status(http, found.running.url)) for _ in range(2)]
        await until(lambda: len(found.running.mind.gate) == 1)
        await found.change({"admission": {"per_replica": 2}})
        await engine.wait_received(2)
        engine.first_byte.set()
        assert await asyncio.gather(*tasks) == [200, 200]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("polcy: kvist", "did you mean 'policy'"),
        ("{", "expected"),
        ("auth: {keys_file: /nowhere}", "/nowhere cannot be read"),
    ],
)
async def test_a_file_that_is_wrong_changes_nothing(configured, http, caplog, text, words) -> None:
    async with FakeEngine() as engine:
        found = await configured(engine)
        found.values |= {"tenant": {"others": {"requests_per_minute": 1}}}
        base = yaml.safe_dump(found.values)
        found.put(text if text == "{" else base + text)
        with contextlib.suppress(yaml.YAMLError):  # the program's own reader says this in words
            await found.running.reloader.look()
            assert words in caplog.text
        assert [await status(http, found.running.url) for _ in range(3)] == [200] * 3


async def test_what_needs_a_restart_is_named_and_stays(configured, http, caplog) -> None:
    async with FakeEngine() as engine:
        found = await configured(engine)
        await found.change({"port": 1, "records": 7, "limits": {"in_flight": 9, "retry_ratio": 0.5}})
        assert "these need a restart: port, limits.in_flight, records" in caplog.text.replace(
            "port, records, limits.in_flight", "port, limits.in_flight, records"
        )
        assert await status(http, found.running.url) == 200


async def test_a_signal_reads_it_at_once_even_if_nothing_changed(configured, until, caplog) -> None:
    caplog.set_level("INFO")
    async with FakeEngine() as engine:
        found = await configured(engine)
        found.running.reloader.now()
        await until(lambda: "read again; changed: nothing" in caplog.text)


def test_limits_that_are_live_exist_and_nothing_else_is_taken() -> None:
    assert set(LIVE_LIMITS) <= LimitSettings.model_fields.keys()
    old = validate(RouterSettings, {"replicas": [{"url": "http://a"}]})
    new = validate(RouterSettings, {"replicas": [{"url": "http://b"}], "log_level": "debug", "host": "::"})
    change = decide(old, new)
    assert change.changed == ("log_level",)
    assert set(change.waits) == {"replicas", "host"}
    assert change.settings == old.model_copy(update={"log_level": "debug"})
