"""The managed Redis' own command line, run with a real redis-server: a password that is nobody's argument."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvist_connector.testing.ports import free_port
from kvist_operator.testing import cluster, rendered

PASSWORD = 'quotes " and back\\slashes $(id) `id`'
pytestmark = pytest.mark.skipif(
    not shutil.which("redis-server") or not shutil.which("redis-cli"),
    reason="redis-server is not installed: `make services` installs it",
)


@dataclass(frozen=True)
class Started:
    """A server and the words of its container."""

    process: subprocess.Popen[str]
    port: int
    alive: list[str]


def container() -> dict[str, Any]:
    found = cluster(cache={"remote": {"redis": {"managed": {"memory": "64Mi"}}}})
    body: dict[str, Any] = rendered(found)["StatefulSet", "test-redis"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    return body


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Started]:
    port = free_port()
    mounts = {"/etc/kvist/redis": tmp_path / "secret", "/tmp": tmp_path / "tmp"}
    for folder in mounts.values():
        folder.mkdir()
    (tmp_path / "secret" / "password").write_text(PASSWORD)

    def here(words: list[str]) -> list[str]:
        inside = re.compile("|".join(mounts))
        found = [str(port) if word == "6379" else word for word in words]
        return [inside.sub(lambda match: str(mounts[match[0]]), word) for word in found]

    body = container()
    command = here([*body["command"], *body["args"]])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "Ready to accept connections" in line:
            break
    yield Started(process, port, here(body["readinessProbe"]["exec"]["command"]))
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    process.wait(timeout=30)
    process.stdout.close()


def ask(redis: Started, *words: str, password: str | None = None) -> str:
    given = ["-a", password, "--no-auth-warning"] if password is not None else []
    command = ["redis-cli", "-p", str(redis.port), *given, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()


def test_the_server_asks_for_the_password_and_keeps_to_its_memory(redis: Started) -> None:
    assert "NOAUTH" in ask(redis, "ping")
    assert ask(redis, "ping", password=PASSWORD) == "PONG"
    assert ask(redis, "config", "get", "maxmemory", password=PASSWORD).split()[-1] == str(64 * 1024**2)
    assert ask(redis, "config", "get", "maxmemory-policy", password=PASSWORD).split()[-1] == "allkeys-lru"
    assert ask(redis, "config", "get", "save", password=PASSWORD).split() == ["save"]


def test_the_password_is_no_argument_of_the_process(redis: Started) -> None:
    command = Path(f"/proc/{redis.process.pid}/cmdline").read_text()
    assert "redis-server" in command
    assert "slashes" not in command


@pytest.mark.parametrize("text", [None, ""], ids=["no-file", "empty"])
def test_it_does_not_start_without_a_password(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "password").write_text(text)
    body = container()
    command = [word.replace("/etc/kvist/redis", str(tmp_path)) for word in [*body["command"], *body["args"]]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert "Ready to accept" not in done.stdout


def test_the_probe_passes_while_it_serves_and_fails_when_it_does_not(redis: Started) -> None:
    assert subprocess.run(redis.alive, timeout=30, check=False).returncode == 0
    ask(redis, "config", "set", "requirepass", "another", password=PASSWORD)
    assert subprocess.run(redis.alive, timeout=30, check=False, capture_output=True).returncode != 0
