"""The router as a process: settings, refusals before anything starts, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import IO, NamedTuple

import aiohttp
import pytest
import yaml

from kvist_connector.testing.ports import free_port
from kvist_router.app import run
from kvist_router.testing.engine import FakeEngine

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
SECONDS = 60


def router_command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "kvist_router", *flags]


class Finished(NamedTuple):
    """What a command left."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture
def run_router(capsys, monkeypatch) -> Callable[..., Finished]:
    """The command in this process: for everything that ends before it serves."""

    def run_here(*flags: str, **environment: str) -> Finished:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                status = run(list(flags))
            except SystemExit as end:  # argparse, for --help and --version
                status = int(end.code or 0)
        return Finished(status, *capsys.readouterr())

    return run_here


@asynccontextmanager
async def process(
    engine: FakeEngine, *flags: str, stderr: IO[bytes] | int = asyncio.subprocess.DEVNULL
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A router process that is ready, and its URL."""
    port = free_port()
    command = router_command("--replica", engine.url, "--port", str(port), "--admin-port", "0", *flags)
    child = await asyncio.create_subprocess_exec(*command, stderr=stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as session:
            while not await ready(session, url):
                assert child.returncode is None
                await asyncio.sleep(0.02)
        yield child, url
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url + "/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


@pytest.mark.parametrize("relays", ["0", "2"])
async def test_sigterm_lets_running_answers_end_and_takes_no_new_ones(relays: str) -> None:
    async with (
        FakeEngine() as engine,
        process(engine, "--relays", relays) as (child, url),
        aiohttp.ClientSession() as session,
    ):
        engine.rest.clear()
        answer = await session.post(url + "/v1/chat/completions", json=CHAT)
        assert await answer.content.readany() == engine.pieces[0]
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(SECONDS):
            while await accepts(url):  # noqa: ASYNC110 - another process has no event for us
                await asyncio.sleep(0.02)
        engine.rest.set()
        assert await answer.read() == b"".join(engine.pieces[1:])
        assert await asyncio.wait_for(child.wait(), SECONDS) == 0


async def accepts(url: str) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    except ConnectionError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize("relays", ["0", "2"])
async def test_the_log_says_each_step_once(tmp_path, relays: str) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        async with FakeEngine() as engine, process(engine, "--relays", relays, stderr=file) as (child, _):
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), SECONDS) == 0
    text = log.read_text()
    assert [text.count(step) for step in ("listening on", "stopping", "closed")] == [1, 1, 1]
    assert "uvicorn" not in text.lower()


async def test_a_hangup_reads_the_configuration_again_and_changes_the_log(tmp_path) -> None:
    config, log = tmp_path / "router.yaml", tmp_path / "log"
    config.write_text("records: 7\n")
    with log.open("wb") as file:
        async with (
            FakeEngine() as engine,
            process(engine, "--config", str(config), stderr=file) as (child, _),
        ):
            config.write_text("log: {format: json}\nrecords: 8\n")
            child.send_signal(signal.SIGHUP)
            async with asyncio.timeout(SECONDS):
                while "restart: records" not in log.read_text():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.02)
            assert child.returncode is None
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert "changed: log.format" in lines[0]["message"]


async def test_the_drain_has_a_deadline() -> None:
    async with FakeEngine() as engine:
        engine.rest.clear()
        brief = process(engine, "--limits.drain-seconds", "1")
        async with brief as (child, url), aiohttp.ClientSession() as session:
            answer = await session.post(url + "/v1/chat/completions", json=CHAT)
            await answer.content.readany()
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), SECONDS) == 0
            answer.close()


@pytest.mark.parametrize("relays", ["0", "2"])
async def test_a_killed_router_leaves_nothing_running_in_the_engine(relays: str) -> None:
    async with (
        FakeEngine() as engine,
        process(engine, "--relays", relays) as (child, url),
        aiohttp.ClientSession() as session,
    ):
        engine.rest.clear()
        answer = await session.post(url + "/v1/chat/completions", json=CHAT)
        await answer.content.readany()
        child.kill()
        await asyncio.wait_for(engine.received[0].ended.wait(), SECONDS)
        assert engine.received[0].cancelled
        answer.close()


async def test_malformed_http_never_reaches_an_engine() -> None:
    requests = [
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"
        b"transfer-encoding: identity\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length : 2\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: +2\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        b"2\n{}\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
        b"\x16\x03\x01 nonsense\r\n\r\n",
    ]
    async with FakeEngine() as engine, process(engine) as (_, url):
        for data in requests:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
            writer.write(data)
            line = await asyncio.wait_for(reader.readline(), SECONDS)
            assert line.startswith(b"HTTP/1.1 400")
            writer.close()
        assert engine.received == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "x"], "port: 'x' is not valid"),
        ([], "no replicas: give --replica URL"),
        (["--replica", "ftp://x"], "is not an http:// or https:// URL"),
        (["--replica", "http://x,agnt=http://y"], "'agnt' is not agent=URL or name=NAME"),
        (["--replica", "http://x,name=a", "--replica", "http://y,name=a"], "name 'a' is given twice"),
        (["--replica", "http://x", "--model.path", "/nowhere"], "give a Hugging Face model folder"),
        (["--replica", "http://x", "--tenant.secret-file", "/nowhere"], "tenant.secret_file: /nowhere"),
        (["--replica", "http://x", "--config", "/nowhere"], "--config /nowhere"),
    ],
)
def test_wrong_settings_are_refused_in_words(run_router, flags: list[str], words: str) -> None:
    found = run_router(*flags, "--admin-port", "0", *([] if "--port" in flags else ["--port", "0"]))
    assert found.status == 2
    assert words in found.stderr
    assert "Traceback" not in found.stderr


def test_a_taken_port_is_refused_with_the_setting(run_router) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = run_router("--replica", "http://x", "--port", str(taken.getsockname()[1]))
    assert found.status == 2
    assert "choose another with --port" in found.stderr


def test_unknown_settings_name_the_nearest(run_router, tmp_path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("polcy: kvist\n")
    assert "did you mean 'policy'" in run_router("--config", str(file)).stderr
    assert "did you mean 'policy'" in run_router("--replica", "http://x", KVIST_ROUTER_POLCY="kvist").stderr


def test_file_environment_and_flags_have_the_same_names_and_their_order(run_router, tmp_path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(yaml.safe_dump({"port": 1, "records": 1, "name": "f", "replicas": [{"url": "http://f"}]}))
    found = run_router(
        "--config", str(file), "--print-config", "--records", "3",
        KVIST_ROUTER_RECORDS="2", KVIST_ROUTER_NAME="e", KVIST_ROUTER_LIMITS__IN_FLIGHT="7",
    )  # fmt: skip
    printed = yaml.safe_load(found.stdout)
    assert (printed["port"], printed["records"], printed["name"]) == (1, 3, "e")
    assert printed["limits"]["in_flight"] == 7
    file.write_text(found.stdout)
    assert run_router("--config", str(file), "--print-config").stdout == found.stdout


def test_help_has_examples_and_version_the_version(run_router) -> None:
    text = run_router("--help").stdout
    assert "examples:\n  kvist router --replica" in text
    assert "[KVIST_ROUTER_LIMITS__BODY_BYTES]" in text
    assert run_router("--version").stdout.startswith("kvist ")


async def test_replicas_come_and_go_with_the_file(router, until, tmp_path) -> None:
    file = tmp_path / "replicas.yaml"

    def write(*urls: str) -> None:
        other = tmp_path / "new.yaml"
        other.write_text(json.dumps([{"name": f"r{n}", "url": url} for n, url in enumerate(urls)]))
        other.rename(file)

    async with FakeEngine() as first, FakeEngine() as second:
        write(first.url)
        running = await router(ready=False, replicas_file=str(file))
        replicas = running.mind.replicas
        await until(lambda: "r0" in replicas and replicas["r0"].healthy)
        write(first.url, second.url)
        await until(lambda: "r1" in replicas and replicas["r1"].healthy)
        file.write_text("{not: [a, list")
        write_time = file.stat().st_mtime_ns
        file.write_text("- {url: 3}")
        assert file.stat().st_mtime_ns >= write_time
        write(second.url)
        await until(lambda: list(replicas) == ["r0"] and replicas["r0"].url == second.url)
