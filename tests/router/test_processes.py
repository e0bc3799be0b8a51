"""The router as several processes: one keeper, one mind, two relays on one port."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvist_connector.errors import ConfigError
from kvist_connector.protocol.feed import FEED_VERSION, Opening
from kvist_connector.protocol.tiers import Tier
from kvist_connector.settings import validate
from kvist_router.processes.folder import PREFIX
from kvist_router.processes.keeper import RunningProcesses, keeping
from kvist_router.reload import ConfigFile
from kvist_router.settings import RouterSettings
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.feed import FakeAgent

URL = "/v1/chat/completions"
RELAYS = 2
SECONDS = 120


def chat(text: str = "x", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


OPENING = Opening(
    version=FEED_VERSION,
    epoch=1,
    replica="r0",
    fingerprint=b"f" * 32,
    group=0,
    model="m",
    chunk_tokens=256,
    block_tokens=32,
    gpu_known=False,
    draining=False,
)
KEYS = [number.to_bytes(16, "little") for number in range(1000)]


class Pool:
    """A kept router, its engines, and a client that makes a connection for each request."""

    def __init__(
        self, kept: RunningProcesses, engines: list[FakeEngine], http: aiohttp.ClientSession
    ) -> None:
        self.kept, self.engines, self.http = kept, engines, http

    async def ask(self, text: str = "x", **headers: str) -> tuple[int, dict[str, str]]:
        async with self.http.post(self.kept.url + URL, json=chat(text), headers=headers) as answer:
            await answer.read()
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}

    async def get(self, path: str, admin: bool = False) -> tuple[int, str]:
        base = self.kept.admin_url if admin else self.kept.url
        async with self.http.get(base + path) as answer:
            return answer.status, await answer.text()

    async def counted(self, name: str, admin: bool = False) -> float:
        _, text = await self.get("/metrics", admin)
        families = text_string_to_metric_families(text)
        return sum(item.value for family in families for item in family.samples if item.name == name)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SECONDS):
        while not await condition():  # noqa: ASYNC110 - other processes have no event for us
            await asyncio.sleep(0.02)


@asynccontextmanager
async def pool(silent_seconds: float = 60, file: Path | None = None) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(2)]
        agent = await stack.enter_async_context(FakeAgent(OPENING, {Tier.MEMORY: KEYS}))
        listed = [{"name": f"r{number}", "url": engine.url} for number, engine in enumerate(engines)]
        listed[0]["agent"] = agent.url
        # A machine that is busy for seconds must not make an engine or a process count as down.
        base: dict[str, Any] = {
            "port": 0,
            "admin_port": 0,
            "replicas": listed,
            "health": {"interval_seconds": 0.1, "timeout_seconds": 60},
            "limits": {
                "hung_seconds": 600,
                "silent_mind_seconds": silent_seconds,
                "grace_seconds": 600,
            },
        }

        def read() -> RouterSettings:
            more = yaml.safe_load(file.read_text()) or {} if file is not None else {}
            return validate(RouterSettings, base | more)

        reading = None if file is None else ConfigFile(file, read)
        kept = await stack.enter_async_context(keeping(read(), RELAYS, reading))
        running = asyncio.create_task(kept.keeper.run())
        stack.push_async_callback(_stop, kept, running)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=SECONDS)
            )
        )
        found = Pool(kept, engines, http)
        await until(lambda: _ready(found))
        yield found


async def _stop(kept: RunningProcesses, running: asyncio.Task[None]) -> None:
    kept.keeper.stop()
    kept.keeper.stop()  # at once
    await asyncio.wait_for(running, SECONDS)


async def _ready(found: Pool) -> bool:
    """Every relay is: connections go to whichever is free."""
    return all([(await found.get("/readyz"))[0] == 200 for _ in range(8)])


async def test_metrics_records_and_settings_are_those_of_one_router(tmp_path) -> None:
    file, keys = tmp_path / "router.yaml", tmp_path / "keys"
    file.write_text("")
    keys.write_text("sha256:" + hashlib.sha256(b"key").hexdigest())
    async with pool(file=file) as found:
        answers = [await found.ask(f"prompt {number}") for number in range(12)]
        assert {status for status, _ in answers} == {200}
        assert await found.counted("kvist_router_requests_total") == 12
        assert await found.counted("kvist_router_requests_total", admin=True) == 12
        assert await found.counted("kvist_router_decisions_total") == 12
        assert await found.counted("kvist_router_processes") == 1 + RELAYS
        status, record = await found.get(f"/v1/kvist/decisions/{answers[0][1]['x-kvist-request-id']}", True)
        assert (status, json.loads(record)["outcome"]) == (200, "ended")
        assert json.loads((await found.get("/v1/models"))[1])["data"][0]["id"] == "m"

        assert found.kept.reloader is not None
        file.write_text(yaml.safe_dump({"auth": {"keys_file": str(keys)}}))
        await found.kept.reloader.look()
        assert [(await found.ask())[0] for _ in range(8)] == [401] * 8
        file.write_text(yaml.safe_dump({"auth": {"keys_file": "/nowhere"}, "policy": "round-robin"}))
        await found.kept.reloader.look()
        assert [(await found.ask(Authorization="Bearer key"))[0] for _ in range(8)] == [200] * 8

        found.kept.keeper.stop()  # grace: nobody is ready, everything is served

        async def stopping() -> bool:
            return all(["is stopping" in (await found.get("/readyz"))[1] for _ in range(8)])

        await until(stopping)
        assert (await found.ask(Authorization="Bearer key"))[0] == 200


async def test_without_the_mind_requests_go_by_hash_and_all_say_so_until_it_is_back(
    capfd, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with pool(silent_seconds=5) as found:
        mind = found.kept.keeper.mind
        before = [await found.ask() for _ in range(3)]
        assert all("x-kvist-routed-by" not in headers for _, headers in before)
        assert mind.pid is not None
        os.kill(mind.pid, signal.SIGSTOP)  # it hangs: relays notice by its silence

        async def by_hash() -> bool:
            answers = [await found.ask("the same beginning") for _ in range(4)]
            assert {status for status, _ in answers} == {200}
            return all(headers.get("x-kvist-routed-by") == "hash" for _, headers in answers)

        await until(by_hash)
        # From either relay one beginning goes to one replica, another may go to another.
        assert len({(await found.ask("the same beginning"))[1]["x-kvist-replica"] for _ in range(8)}) == 1
        assert len({(await found.ask(f"{n}"))[1]["x-kvist-replica"] for n in range(16)}) == 2
        status, text = await found.get("/readyz")
        assert status == 200
        assert "mind is gone" in json.loads(text)["degraded"]

        # Folders for temporary files are cleaned; what is in this one is needed still.
        (folder,) = tmp_path.glob(f"{PREFIX}*")
        shutil.rmtree(folder)
        # Relays that start meanwhile know what those before them knew.
        assert await found.counted("kvist_router_without_mind_total") >= 28
        for relay in found.kept.keeper.relays:
            relay.kill()
        await until(lambda: _is(lambda: all(relay.restarts == 1 for relay in found.kept.keeper.relays)))
        await until(by_hash)
        assert (await found.get("/readyz"))[0] == 200

        watching = asyncio.create_task(mind.watch(hung_seconds=0.05, every=0.0))
        await until(lambda: _is(lambda: mind.restarts == 1))  # the keeper gave up on it
        watching.cancel()

        async def back() -> bool:
            return all(["x-kvist-routed-by" not in (await found.ask())[1] for _ in range(4)])

        await until(back)
        replicas = json.loads((await found.get("/v1/kvist/replicas", True))[1])["replicas"]
        assert [(item["mirrored"], item["feed"]["keys"]) for item in replicas] == [(True, 1000), (False, 0)]
        assert "degraded" not in json.loads((await found.get("/readyz"))[1])
        assert await found.counted("kvist_router_without_mind_total") >= 28
        assert await found.counted("kvist_router_process_restarts_total") == 1 + RELAYS
        assert await found.counted("kvist_router_decisions_total") >= 4
    log = capfd.readouterr().err
    assert "the mind is gone: the mind was silent for 5 s" in log


async def test_while_the_mind_starts_again_the_admin_port_says_so_at_once() -> None:
    async with pool() as found:
        mind, seen = found.kept.keeper.mind, []
        assert (await found.ask())[0] == 200
        assert await found.counted("kvist_router_decisions_total") == 1
        stopped = asyncio.Event()

        async def asked() -> None:
            while not stopped.is_set():
                seen.append(await found.get("/v1/kvist/replicas", admin=True))

        mind.kill()
        await asyncio.wait_for(mind.vacant.wait(), SECONDS)
        status, said = await found.get("/v1/kvist/replicas", admin=True)
        assert (status, json.loads(said)["error"]["code"]) == (503, "no_mind")
        assert (await found.get("/healthz", admin=True))[0] == 503
        assert await found.counted("kvist_router_decisions_total", admin=True) == 1  # as before it ended
        asking = asyncio.create_task(asked())
        await asyncio.wait_for(mind.serves.wait(), SECONDS)
        await until(lambda: _is(lambda: bool(seen) and seen[-1][0] == 200))
        stopped.set()
        await asking
        assert {answer[0] for answer in seen} <= {503, 200}  # none was lost, none waited for the other
        assert [(await found.get("/healthz", admin=True))[0] for _ in range(4)] == [200] * 4


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()


async def test_a_relay_that_is_killed_loses_its_own_streams_only_and_is_replaced() -> None:
    async with pool() as found:
        for engine in found.engines:
            engine.rest.clear()
        streams = [await found.http.post(found.kept.url + URL, json=chat(stream=True)) for _ in range(12)]
        first = await found.counted("kvist_router_in_flight_requests")
        assert first == 12
        relay = found.kept.keeper.relays[0]
        relay.kill()
        for engine in found.engines:
            engine.rest.set()
        assert [(await found.ask())[0] for _ in range(20)] == [200] * 20
        ends = await asyncio.gather(*(stream.read() for stream in streams), return_exceptions=True)
        whole = [end for end in ends if isinstance(end, bytes)]
        assert all(end.endswith(b"[DONE]\n\n") for end in whole)
        await until(lambda: _is(lambda: relay.restarts == 1 and relay.up))
        assert (await found.ask())[0] == 200
        assert await found.counted("kvist_router_in_flight_requests") == 0
        relay.kill()  # and the router ends all the same, before the next one is there


async def test_what_is_wrong_in_a_child_ends_the_start_in_words(tmp_path) -> None:
    settings = {"port": 0, "admin_port": 0, "replicas": [{"url": "http://127.0.0.1:9"}]}
    wrong = validate(RouterSettings, {**settings, "model": {"path": str(tmp_path)}})
    with pytest.raises(ConfigError, match="tokenizer"):
        async with keeping(wrong, 1):
            raise AssertionError("it started")
