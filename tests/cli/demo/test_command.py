"""`kvist demo` as a person runs it, with fake clusters."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvist_cli.app import app
from kvist_cli.demo import entry
from kvist_cli.local.state import RunFolder
from kvist_connector.errors import ConfigError

CONFIG = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def demo(up: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setattr(
        entry.Cluster, "up", lambda manifest, options, on_event: up(manifest, options.run_dir)
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return lambda *flags: CliRunner().invoke(app, ["demo", "--quick", "--model", str(model), *flags])


def left_behind(tmp_path: Path) -> list[str]:
    return [path.name for path in workplace(tmp_path).iterdir() if path.is_dir()]


def workplace(tmp_path: Path) -> Path:
    return tmp_path / "state" / "kvist" / "demo"


def test_it_writes_the_figures_and_leaves_nothing_behind(demo: Any, tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    result = demo("--json", str(target))
    assert result.exit_code == 0, result.output
    assert json.loads(target.read_text())["exact"] is True
    assert "answers from cache: exact (6 prompts)" in result.output
    assert left_behind(tmp_path) == []


def test_an_inexact_answer_is_exit_status_1(demo: Any, world: Any) -> None:
    world.wrong_tier = "disk"
    result = demo()
    assert result.exit_code == 1
    assert "NOT exact" in result.output


def test_a_json_file_in_a_missing_folder_is_refused_before_anything_starts(demo: Any, world: Any) -> None:
    result = demo("--json", "/nowhere/figures.json")
    assert result.exit_code == 2
    assert "does not exist" in result.output
    assert world.log == []


def test_a_cluster_that_cannot_start_is_one_message(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("spec.cache.memory: more than the machine has")

    monkeypatch.setattr(entry.Cluster, "up", refuse)
    result = demo()
    assert result.exit_code == 2
    assert "more than the machine has" in result.output
    assert "Traceback" not in result.output


def test_logs_of_a_failure_are_kept_and_named(demo: Any, world: Any, tmp_path: Path) -> None:
    world.broken = True
    world.writes_logs = True
    result = demo()
    assert result.exit_code == 1
    named = re.search(r"logs of what failed: (\S+)", result.output)
    assert named
    assert Path(named[1]).is_dir()


def test_what_an_earlier_demo_left_is_gone_before_the_next_starts(demo: Any, tmp_path: Path) -> None:
    chunk = workplace(tmp_path) / "kvist" / "replica-0" / "disk" / "chunk"
    chunk.parent.mkdir(parents=True)
    chunk.write_text("old")
    assert demo().exit_code == 0
    assert not chunk.exists()


def test_a_second_demo_at_the_same_time_is_refused(demo: Any, tmp_path: Path, world: Any) -> None:
    lock = RunFolder(workplace(tmp_path)).lock()
    assert lock
    result = demo()
    lock.release()
    assert result.exit_code == 2
    assert "another kvist demo is running" in result.output
    assert world.log == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_cluster(
    demo: Any, world: Any, tmp_path: Path, number: signal.Signals
) -> None:
    world.on_chat = lambda count: os.kill(os.getpid(), number) if count == 5 else None
    result = demo()
    assert result.exit_code == 130
    # Requests on their way when the signal came may be written to the log after it, nothing else may.
    assert [entry for entry in world.log if not entry.startswith("/")][-1].endswith("flush=False")
    assert left_behind(tmp_path) == []


def test_keep_shows_url_and_curl_and_waits_for_an_interrupt(
    demo: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def wait(self) -> None:
            assert not world.log[-1].startswith("down")
            raise KeyboardInterrupt

    monkeypatch.setattr(entry, "Event", Interrupted)
    result = demo("--keep")
    assert result.exit_code == 0
    assert f"curl -i {world.base}/router/v1/chat/completions" in result.output
    assert world.log[-1].startswith("down")


def test_taken_ports_are_passed_over() -> None:
    first = entry.free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first.router))
        taken.listen()
        assert entry.free_ports().router != first.router
