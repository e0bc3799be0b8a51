"""`kvist up` as a user runs it: real command, agents and router; the engine is a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trustme
import yaml

from kvist_connector.testing.ports import free_ports

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
PORTS = ("router", "router-admin", "engine", "agent", "peer")
ENGINES = 2


def cluster_ports() -> dict[str, int]:
    """First ports such that each and the next one are free."""
    return dict(zip(PORTS, free_ports(len(PORTS), run=2), strict=True))


class Shell:
    """Runs the command with folders of its own and vLLM replaced."""

    def __init__(self, folder: Path, model: Path) -> None:
        package = folder / "path" / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        for parent in (package, package.parent, package.parent.parent):
            (parent / "__init__.py").touch()
        shutil.copy(FAKE_ENGINE, package / "api_server.py")
        self.folder = folder
        self.ports = cluster_ports()
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder / "path"), os.environ.get("PYTHONPATH", "")]),
            "XDG_STATE_HOME": str(folder / "state"),
            "COLUMNS": "200",
        }
        self.manifest = folder / "cluster.yaml"
        self.write(model)

    def write(self, model: Path | str, **sections: Any) -> None:
        spec = {
            "model": {"name": str(model), "servedName": "tiny"},
            "engine": {"replicas": ENGINES, "kvCacheMemory": "256Mi"},
            "cache": {"memory": "32Mi", "disk": {"size": "64Mi"}, "peers": {"enabled": True}},
            **sections,
        }
        document = {
            "apiVersion": "kvist.dev/v1alpha1",
            "kind": "CacheCluster",
            "metadata": {"name": f"test-{os.getpid()}"},
            "spec": spec,
        }
        self.manifest.write_text(yaml.safe_dump(document))

    def engine(self, code: str) -> None:
        (self.folder / "path" / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(code)

    @property
    def up_command(self) -> list[str]:
        flags = [part for name, port in self.ports.items() for part in (f"--port-{name}", str(port))]
        arenas = ["--arena-dir", str(self.folder)]
        return [sys.executable, "-m", "kvist_cli", "up", "-f", str(self.manifest), *flags, *arenas]

    def start(self, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.up_command, *more],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvist_cli", *arguments]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )

    def up(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.up_command, *more],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.call("status", "--json").stdout)
        return report

    def programs(self) -> list[psutil.Process]:
        """Every process that was started with this shell's folder or engines' ports in its command line."""
        engines = [f"--port {self.ports['engine'] + number}" for number in range(ENGINES)]
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if str(self.folder) in line or any(port in line for port in engines):
                found.append(process)
        return found


@pytest.fixture
def shell(tmp_path: Path, smollm2: Path) -> Iterator[Shell]:
    made = Shell(tmp_path, smollm2)
    yield made
    left = made.programs()
    for process in left:
        process.kill()
    assert left == []


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Output up to the line that holds `text`."""
    assert process.stdout is not None
    output = ""
    end = time.monotonic() + 120
    for line in process.stdout:
        output += line
        if text in line:
            return output
        assert time.monotonic() < end, output
    pytest.fail(f"{text!r} did not come:\n{output}")


def test_up_serves_requests_and_ctrl_c_ends_every_child(shell: Shell) -> None:
    with shell.start() as up:
        output = read_until(up, "curl http://")
        for program in ("agent-0", "agent-1", "engine-0", "engine-1", "router"):
            assert f"{program} ready (" in output
        url = f"http://127.0.0.1:{shell.ports['router']}"
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "Hello"}, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == " world"
        assert answer.headers["x-kvist-replica"] in ("replica-0", "replica-1")
        report = shell.status()
        assert report["healthy"] is True
        assert [p["phase"] for p in report["programs"]] == ["ready"] * 5
        assert set(report["agents"]) == {"replica-0", "replica-1"}
        assert {r["name"] for r in report["router"]["replicas"]} == {"replica-0", "replica-1"}
        assert report["hits"]["recorded_requests"] == 0
        shown = shell.call("status").stdout
        assert "memory 0 chunks" in shown
        assert "replica-1 healthy" in shown
        assert "no requests recorded yet" in shown
        up.send_signal(signal.SIGINT)
        rest = up.stdout.read() if up.stdout is not None else ""
        assert up.wait(60) == 0, rest
    assert "agent-1: flushed" in rest
    assert rest.rstrip().endswith("stopped")
    assert shell.programs() == []
    assert not list(shell.folder.glob("*.arena"))


def test_a_second_up_is_refused_and_the_first_goes_on(shell: Shell) -> None:
    with shell.start() as first:
        read_until(first, "curl http://")
        second = shell.up()
        assert second.returncode == 1
        assert f"is already up (pid {first.pid})" in second.stderr
        check = shell.up("--check")
        assert check.returncode == 1
        assert "is already up" in check.stderr
        assert "is taken" not in check.stderr
        assert shell.status()["healthy"] is True
        done = shell.call("down")
        assert done.returncode == 0, done.stderr
        assert "is down" in done.stdout
        assert first.wait(60) == 0


def test_detached_it_runs_on_restarts_what_dies_and_down_ends_it(
    shell: Shell, until: Callable[[Callable[[], bool]], None]
) -> None:
    done = shell.up("--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ready: http://127.0.0.1:" in done.stdout
    before = {p["name"]: p["pid"] for p in shell.status()["programs"]}
    os.kill(before["engine-1"], signal.SIGKILL)

    def restarted() -> bool:
        report = shell.status()
        after = {p["name"]: p["pid"] for p in report["programs"]}
        return bool(report["healthy"]) and after["engine-1"] != before["engine-1"]

    until(restarted)
    assert {p["name"]: p["pid"] for p in shell.status()["programs"]} | {
        "engine-1": before["engine-1"]
    } == before
    down = shell.call("down")
    assert down.returncode == 0
    assert "agent-0 stopped" in down.stdout
    assert shell.programs() == []


def test_ctrl_c_of_a_detached_start_leaves_nothing(shell: Shell) -> None:
    shell.engine(SLEEPER)
    with shell.start("--detach", "--stop-deadline", "0.5") as up:
        read_until(up, "engine-1 starting")
        up.send_signal(signal.SIGINT)
        output = up.stdout.read() if up.stdout is not None else ""
        assert up.wait(120) == 130, output
    assert "the supervisor ends what it has started" in output
    assert shell.programs() == []


def test_the_controls_reach_every_agent_of_the_cluster(shell: Shell, tmp_path: Path) -> None:
    assert shell.up("--detach").returncode == 0
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("1, 2, 3")
    stats = json.loads(shell.call("stats", "--json").stdout)
    assert set(stats) == {"replica-0", "replica-1"}
    assert stats["replica-0"]["tiers"]["memory"]["chunks"] == 0
    assert "replica-1: 0 chunks, 0 tokens, 0 B removed" in shell.call("clear", "--tier", "memory").stdout
    moved = shell.call("move", "--all", "--to", "replica-1").stdout
    assert moved == "replica-0: 0 chunks, 0 tokens, 0 B moved\n"
    nowhere = shell.call("move", "--all", "--to", "replica-2")
    assert nowhere.returncode != 0
    assert "'replica-2' is neither a tier nor a replica; valid: memory, disk" in nowhere.stderr
    agent = f"http://127.0.0.1:{shell.ports['agent']}"
    found = shell.call("lookup", "--tokens", str(tokens), "--agent", agent, "--json")
    assert json.loads(found.stdout)[agent.removeprefix("http://")]["hit_tokens"] == 0
    assert shell.call("down", "--no-flush").returncode == 0


def test_a_taken_port_is_named_with_its_owner_before_anything_starts(shell: Shell) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", shell.ports["agent"] + 1))
        taken.listen()
        done = shell.up()
    assert done.returncode == 2
    assert (
        f"--port-agent: port {shell.ports['agent'] + 1} of agent-1 is taken by pid {os.getpid()}"
        in done.stderr
    )
    assert shell.programs() == []


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ("/nope", {}, "spec.model.name: '/nope': there is no such folder"),
        (
            "MODEL",
            {"cache": {"memory": "1Mi"}},
            "spec.cache.memory: 1Mi is not possible: one chunk of this model",
        ),
        ("MODEL", {"cache": {"memory": "900Ti"}}, "spec.cache.memory: 900Ti is not possible"),
        ("MODEL", {"cache": {"disk": {"size": "900Ti"}}}, "spec.cache.disk.size: 900Ti is not possible"),
        ("MODEL", {"cache": {"memry": 1}}, "spec.cache.memry: no such field; did you mean 'memory'?"),
        ("MODEL", {"engine": {"replicas": "two"}}, "spec.engine.replicas: 'two' is not valid"),
        (
            "MODEL",
            {"cache": {"memory": "32Mi", "disk": {"size": "64Mi", "path": "/etc/passwd"}}},
            "spec.cache.disk.path: '/etc/passwd/",
        ),
        (
            "MODEL",
            {"cache": {"memory": "32Mi", "disk": {"size": "64Mi", "path": "~nobody-of-that-name/x"}}},
            "spec.cache.disk.path: '~nobody-of-that-name/x' begins with the home of an unknown user",
        ),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    shell: Shell, smollm2: Path, model: str, sections: dict[str, Any], message: str
) -> None:
    shell.write(smollm2 if model == "MODEL" else model, **sections)
    done = shell.up()
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert "Traceback" not in done.stderr
    assert shell.programs() == []


def test_a_broken_engine_is_shown_with_its_log_and_everything_else_ends(shell: Shell) -> None:
    shell.engine("raise SystemExit('engine cannot start: no such device')")
    done = shell.up()
    assert done.returncode == 1
    assert "failed: ended with exit code 1 before it was healthy" in done.stderr
    assert "engine cannot start: no such device" in done.stderr
    assert shell.programs() == []


SLEEPER = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""


def test_ctrl_c_during_the_start_ends_what_runs_already(shell: Shell) -> None:
    shell.engine(SLEEPER)
    with shell.start("--stop-deadline", "0.5") as up:
        read_until(up, "engine-1 starting")
        up.send_signal(signal.SIGINT)
        output = up.stdout.read() if up.stdout is not None else ""
        assert up.wait(60) == 130
    assert "interrupted" in output
    assert "Traceback" not in output
    assert shell.programs() == []


def test_a_second_ctrl_c_kills_what_will_not_end(shell: Shell) -> None:
    deaf = "import signal\n\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nimport argparse"
    shell.engine(FAKE_ENGINE.read_text().replace("import argparse", deaf, 1))
    with shell.start("--stop-deadline", "300") as up:
        read_until(up, "curl http://")
        up.send_signal(signal.SIGINT)
        read_until(up, "engine-1 stopping")
        up.send_signal(signal.SIGINT)
        rest = up.stdout.read() if up.stdout is not None else ""
        assert up.wait(60) == 0, rest
    assert shell.programs() == []


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--arena-dir", "is not a folder; /dev/shm is the usual one"), ("--run-dir", "cannot be used")],
)
def test_folders_that_cannot_be_used_are_named(shell: Shell, flag: str, message: str) -> None:
    done = shell.up(flag, str(shell.manifest / "below-a-file"))
    assert done.returncode == 2
    assert f"error: {flag}: '{shell.manifest}/below-a-file' {message}" in done.stderr


def test_check_starts_nothing_and_names_what_would_run(shell: Shell, smollm2: Path) -> None:
    shell.write(smollm2, cache={"enabled": False}, security={}, engine={"shmSize": "1Gi"})
    done = shell.up("--check")
    assert done.returncode == 0, done.stderr
    assert "only for Kubernetes, not used here: spec.engine.shmSize, spec.security" in done.stdout
    assert "would run engine-0, router" in done.stdout


def closed_router(folder: Path) -> dict[str, Any]:
    """A section router that asks for keys over TLS; its files are in `folder`."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    hashed = {name: sha256(name.encode()).hexdigest() for name in ("for-all", "for-research")}
    files = {
        "api/keys": f"sha256:{hashed['for-all']} batch\n".encode(),
        "research/token": f"sha256:{hashed['for-research']}\n".encode(),
        "web/tls.crt": certificate.cert_chain_pems[0].bytes(),
        "web/tls.key": certificate.private_key_pem.bytes(),
        "ca.pem": authority.cert_pem.bytes(),
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return {
        "auth": {"apiKeys": {"name": "api", "key": "keys"}},
        "tenants": [{"name": "research", "apiKeys": {"name": "research"}}],
        "tls": {
            "certificate": {"name": "web", "key": "tls.crt"},
            "privateKey": {"name": "web", "key": "tls.key"},
        },
    }


def test_keys_tenants_and_tls_of_a_manifest_hold_on_one_machine(
    shell: Shell, smollm2: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "given"
    shell.write(smollm2, router=closed_router(folder), engine={"replicas": 1, "kvCacheMemory": "256Mi"})
    missing = shell.up("--check", "--secrets-dir", str(tmp_path / "empty"))
    assert missing.returncode == 2
    assert "spec.router.auth.apiKeys: '" in missing.stderr
    assert "empty/api/keys' is not there" in missing.stderr
    with shell.start("--secrets-dir", str(folder)) as up:
        shown = read_until(up, "curl --insecure https://")
        assert '-H "authorization: Bearer $KEY"' in shown
        base = f"https://127.0.0.1:{shell.ports['router']}/v1"
        with httpx.Client(verify=ssl.create_default_context(cafile=folder / "ca.pem"), timeout=30) as client:
            body = {"model": "tiny", "prompt": "Hello"}
            assert client.post(base + "/completions", json=body).status_code == 401
            for key in ("for-all", "for-research"):
                headers = {"authorization": f"Bearer {key}"}
                assert client.post(base + "/completions", json=body, headers=headers).status_code == 200
        assert shell.status()["healthy"] is True
        (secret,) = (shell.folder / "state").rglob("tenants.secret")
        assert secret.stat().st_mode & 0o077 == 0
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0


def test_a_secret_of_a_shared_tier_is_a_file_that_must_be_there(shell: Shell, smollm2: Path) -> None:
    redis = {"urls": ["redis://redis.example:6379"], "password": {"name": "redis", "key": "password"}}
    shell.write(smollm2, cache={"remote": {"redis": redis}})
    secrets = shell.folder / "secrets"
    done = shell.up("--check", "--secrets-dir", str(secrets))
    assert done.returncode == 2, done.stdout
    path = secrets / "redis" / "password"
    assert f"spec.cache.remote.redis.password: '{path}' is not there" in done.stderr
    path.parent.mkdir(parents=True)
    path.write_text("secret")
    done = shell.up("--check", "--secrets-dir", str(secrets))
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--run-dir", "/etc/passwd"), "--run-dir: '/etc/passwd' cannot be used: '/etc/passwd' is no folder"),
        (("--run-dir", "/tmp/" + "x" * 300), "--run-dir"),
        (("--run-dir", "~nobody-of-that-name/x"), "--run-dir"),
        (("--arena-dir", "/etc/passwd"), "--arena-dir: '/etc/passwd' is not a folder"),
        (("--host", "192.0.2.1"), "--host: '192.0.2.1' is no address of this machine"),
        (("--host", "\u00e9.."), "is no address of this machine"),
    ],
)
def test_check_says_which_flag_cannot_be_used(shell: Shell, flags: tuple[str, str], message: str) -> None:
    done = shell.up("--check", *flags)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
