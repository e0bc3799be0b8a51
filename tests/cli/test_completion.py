"""What the shell offers to complete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_KVIST = "import sys; sys.argv = ['kvist']; from kvist_cli.__main__ import main; main()"


@pytest.mark.parametrize("command", ["down", "status"])
def test_names_of_clusters_are_completed(tmp_path: Path, command: str) -> None:
    for name in ("tiny", "tall", "other", "never-started"):
        folder = tmp_path / "kvist" / name
        folder.mkdir(parents=True)
        if name != "never-started":
            (folder / "state.json").touch()
    asked = {"_KVIST_COMPLETE": "complete_bash", "COMP_WORDS": f"kvist {command} t", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", _KVIST],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), **asked},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["tall", "tiny"], done.stderr
