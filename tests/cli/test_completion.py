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
    files = {"state.json", "lock"}
    clusters = {
        "tiny": files,
        "tall": files,
        "other": files,
        "the-other-kind": {"state.json"},
        "t-ended": {"lock"},
    }
    for name, kept in clusters.items():
        folder = tmp_path / "kvist" / name
        folder.mkdir(parents=True)
        for file in kept:
            (folder / file).touch()
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
