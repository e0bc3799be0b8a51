"""An engine without an agent's address gets one of its own: real agent processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from kvist_connector.engines.spawn import REVIVE_PAUSE, Reviver, SpawnSettings, ensure_agent, listening
from kvist_connector.errors import ConfigError

pytestmark = pytest.mark.timeout(180)

IN_ANOTHER_PROCESS = """
import sys, pathlib
from kvist_connector.engines.spawn import SpawnSettings, ensure_agent
ensure_agent(SpawnSettings(pathlib.Path(sys.argv[1]), "64Mi", idle_exit=float(sys.argv[2])))
sys.stdin.read()
"""


def until(condition, deadline=90.0):
    end = time.monotonic() + deadline
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, "not reached in time"
        pause.wait(0.05)


def agents(folder: Path) -> list[psutil.Process]:
    """Live agent processes of a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and "kvist_connector" in line and str(folder / "agent.sock") in line:
            found.append(process)
    return found


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="kvist-spawn-") as name:
        path = Path(name) / "own"
        yield path
        for process in agents(path):
            process.kill()
            process.wait(30)


@pytest.fixture
def settings(folder):
    return SpawnSettings(folder, "64Mi", idle_exit=600.0)


def test_the_agent_runs_in_a_session_of_its_own_and_logs_beside_its_socket(settings):
    assert ensure_agent(settings) == settings.socket
    until(lambda: listening(settings.socket))
    (process,) = agents(settings.folder)
    with subprocess.Popen(["ps", "-o", "sid=", "-p", str(process.pid)], stdout=subprocess.PIPE) as ps:
        assert int(ps.stdout.read()) == process.pid
    assert settings.log.stat().st_size > 0
    assert settings.folder.stat().st_mode & 0o777 == 0o700


def test_many_processes_at_once_share_one_agent(settings):
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(settings.folder), "600"]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(3)]
    until(lambda: listening(settings.socket))
    (before,) = agents(settings.folder)
    assert ensure_agent(settings) == settings.socket  # as an engine that starts later
    for other in others:
        other.stdin.close()
        assert other.wait(60) == 0
    assert [process.pid for process in agents(settings.folder)] == [before.pid]  # it outlives them


def test_an_engine_that_kills_its_descendants_leaves_the_agent(settings):
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(settings.folder), "600"]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE)
    until(lambda: listening(settings.socket))
    (agent,) = agents(settings.folder)
    assert agent not in psutil.Process(engine.pid).children(recursive=True)
    engine.stdin.close()
    assert engine.wait(60) == 0


def test_an_agent_without_connections_leaves(folder):
    ensure_agent(SpawnSettings(folder, "64Mi", idle_exit=0.3))
    until(lambda: (folder / "agent.log").exists() and "leaving" in (folder / "agent.log").read_text())
    until(lambda: not agents(folder))
    ensure_agent(SpawnSettings(folder, "64Mi", idle_exit=600.0))
    until(lambda: listening(folder / "agent.sock"))


def test_a_killed_agent_is_replaced_while_the_engine_runs(settings):
    ensure_agent(settings)
    until(lambda: listening(settings.socket))
    (first,) = agents(settings.folder)
    now = [0.0]
    revive = Reviver(settings, clock=lambda: now[0])
    now[0] += REVIVE_PAUSE
    revive()  # one listens: nothing to do
    first.kill()
    until(lambda: not agents(settings.folder))
    now[0] += REVIVE_PAUSE / 2
    revive()
    assert not agents(settings.folder)  # too soon after the last attempt

    def revived():  # whoever watched the first one's start may hold the lock for a moment still
        now[0] += REVIVE_PAUSE
        revive()
        return listening(settings.socket)

    until(revived)
    (second,) = agents(settings.folder)
    assert second.pid != first.pid


def test_an_agent_that_cannot_start_is_named_with_its_log(folder, caplog):
    settings = SpawnSettings(folder, "not a quantity")
    ensure_agent(settings)
    until(lambda: "ended as it started" in caplog.text)
    assert str(settings.log) in caplog.text
    assert "memory" in settings.log.read_text()


def test_a_folder_that_cannot_be_used_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give a folder that this user can write"):
        ensure_agent(SpawnSettings(tmp_path / "file" / "own", "64Mi"))
    with pytest.raises(ConfigError, match="choose a shorter one"):
        ensure_agent(SpawnSettings(tmp_path / ("x" * 120), "64Mi"))


def test_a_reviver_whose_folder_is_gone_only_logs(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    now = [0.0]
    revive = Reviver(SpawnSettings(tmp_path / "file" / "own", "64Mi"), clock=lambda: now[0])
    now[0] = REVIVE_PAUSE
    revive()
    assert "cannot be started again" in caplog.text


@pytest.mark.parametrize("whose", ["folder", "parent", "link"])
def test_a_folder_of_another_user_is_refused(tmp_path, whose, monkeypatch):
    for_all = tmp_path / "shm"
    for_all.mkdir()
    for_all.chmod(0o1777)
    folder = for_all / "kvist" / "model"
    owners = {"folder": folder, "parent": folder.parent, "link": folder}
    folder.mkdir(parents=True)
    if whose == "link":
        folder.rmdir()
        folder.symlink_to(tmp_path)
    status = type(folder).lstat if whose == "link" else type(folder).stat
    monkeypatch.setattr(type(folder), status.__name__, of_another_user(status, owners[whose]))
    with pytest.raises(ConfigError, match="belongs to another user"):
        ensure_agent(SpawnSettings(folder, "64Mi"))


def of_another_user(status, path):
    def found(self, **options):
        real = status(self, **options)
        if self != path or options:
            return real
        return os.stat_result((*real[:4], os.geteuid() + 1, *real[5:10]))

    return found
