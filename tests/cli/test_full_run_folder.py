"""A run folder that takes nothing for a while: programs are kept all the same, no file is half written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvist_cli.local import EventKind, supervisor
from kvist_cli.local.prepare import TENANT_SECRET, keep_tenant_secret
from kvist_cli.local.state import STATE_FILE, RunFolder
from kvist_connector.errors import ConfigError

Until = Callable[[Callable[[], bool]], None]


def test_a_state_that_could_not_be_written_is_written_when_it_can_be(
    stage: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_AGAIN_SECONDS", 0.02)
    folder = RunFolder(stage.folder)
    cluster = stage.run(stage.program("engine-0"))
    in_the_way = stage.folder / f".{STATE_FILE}.{os.getpid()}"
    in_the_way.mkdir()
    try:
        old = cluster.kill("engine-0")
        cluster.wait_ready("engine-0")
        state = folder.read()
        assert state is not None
        assert state.programs[0].identity is not None
        assert state.programs[0].identity.pid == old
        in_the_way.rmdir()

        def is_said() -> bool:
            now = folder.read()
            return now is not None and now.programs == cluster.programs()

        until(is_said)
        notes = [event for event in stage.events if event.kind is EventKind.NOTE]
        assert [note.message.split(":")[0] for note in notes] == ["state cannot be written"]
    finally:
        cluster.down()
    assert folder.read() is None


def test_a_folder_that_cannot_be_written_to_fails_the_start_in_words(stage: Any) -> None:
    program = stage.program("engine-0")
    in_the_way = program.log.with_suffix(".previous.log")
    in_the_way.mkdir(parents=True)
    program.log.write_text("of the run before")
    with pytest.raises(ConfigError, match=r"--run-dir: '.*' cannot be written to: Is a directory"):
        stage.run(program)


def test_a_secret_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            keep_tenant_secret(folder)
    assert list(tmp_path.iterdir()) == []
    keep_tenant_secret(folder)
    secret = tmp_path / TENANT_SECRET
    first = secret.read_text()
    assert (len(first), secret.stat().st_mode & 0o777) == (64, 0o600)
    keep_tenant_secret(folder)
    assert secret.read_text() == first
