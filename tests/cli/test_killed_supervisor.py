"""The supervisor dies by kill -9: programs go on, and the next `down` or `up` ends exactly them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvist_cli.app import app
from kvist_cli.local.identity import Identity, identify, members
from kvist_cli.local.state import ClusterState, RunFolder

Until = Callable[[Callable[[], bool]], None]

OWNER = """
import os, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import Stage
stage = Stage(Path(sys.argv[2]))
stage.run(stage.program("agent-0"), stage.program("engine-0", "parent"), stage.program("router"))
print("up", flush=True)
threading.Event().wait()
"""


@contextmanager
def killed_owner(folder: Path) -> Iterator[ClusterState]:
    """A cluster whose supervisor was killed; whatever is left of it is killed at the end."""
    command = [sys.executable, "-c", OWNER, str(Path(__file__).parent), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        owner.kill()
    state = RunFolder(folder).read()
    assert state is not None
    try:
        yield state
    finally:
        for identity in identities(state):
            for pid in members(identity):
                os.kill(pid, signal.SIGKILL)


def identities(state: ClusterState) -> list[Identity]:
    return [p.identity for p in state.programs if p.identity is not None]


def alive(state: ClusterState) -> list[int]:
    return [pid for identity in identities(state) for pid in members(identity)]


def test_down_ends_what_a_killed_supervisor_left_children_of_programs_too(tmp_path: Path) -> None:
    with killed_owner(tmp_path) as state:
        assert len(alive(state)) == 4
        arena = next(p.arena for p in state.programs if p.arena is not None)
        arena.write_bytes(b"x")
        done = CliRunner().invoke(app, ["down", "--run-dir", str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert "left by a supervisor that is gone" in done.output
        assert alive(state) == []
        assert not arena.exists()
    journal = (tmp_path / "journal").read_text().splitlines()
    assert journal.index("router term") < journal.index("engine-0 term") < journal.index("agent-0 flush")
    assert RunFolder(tmp_path).read() is None


def test_the_next_start_cleans_up_says_so_and_works(stage: Any) -> None:
    with killed_owner(stage.folder) as state:
        with stage.run(stage.program("engine-0")) as cluster:
            assert alive(state) == []
            assert cluster.pid("engine-0") not in [identity.pid for identity in identities(state)]
        notes = [event.message for event in stage.events]
        assert "cleaning up after a killed supervisor: agent-0, engine-0, router" in notes


def test_status_says_that_the_supervisor_is_dead(tmp_path: Path) -> None:
    with killed_owner(tmp_path):
        done = CliRunner().invoke(app, ["status", "--run-dir", str(tmp_path), "--json"])
        assert done.exit_code == 1
        assert '"alive": false' in done.output


def test_a_process_that_got_the_pid_later_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        now = identify(stranger.pid)
        assert now is not None
        assert members(now) == [stranger.pid]
        assert members(now.model_copy(update={"start": now.start - 1})) == []
        assert members(now.model_copy(update={"boot": "another"})) == []
        stranger.kill()


def test_a_state_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    done = CliRunner().invoke(app, ["down", "--run-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert f"{tmp_path / 'state.json'}: cannot be read" in done.output


@pytest.mark.parametrize("command", ["down", "status", "stats"])
def test_a_name_that_does_not_run_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = CliRunner().invoke(app, [command, "nobody"])
    assert done.exit_code == 2
    assert "no cluster runs in" in done.output


def test_a_program_whose_pid_was_not_written_yet_is_ended_too(tmp_path: Path) -> None:
    with killed_owner(tmp_path) as state:
        agent = next(p for p in state.programs if p.name == "agent-0")
        early = tuple(p.model_copy(update={"identity": None}) if p is agent else p for p in state.programs)
        RunFolder(tmp_path).write(state.model_copy(update={"programs": early}))
        done = CliRunner().invoke(app, ["down", "--run-dir", str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert alive(state) == []
