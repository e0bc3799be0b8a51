"""Runs one of the package's worker modules; its last line of output is a JSON object."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from kvist_connector.errors import ConfigError


def run_worker(module: str, arguments: Sequence[str], environment: Mapping[str, str], deadline: float) -> str:
    """The `path` of its answer; raises ConfigError with its `error`, or with the end of what it wrote."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=deadline, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{module} did not end within {deadline:.0f} s") from error
    answer = _answer(done.stdout)
    if done.returncode == 0 and "path" in answer:
        return answer["path"]
    reason = answer.get("error") or "\n".join(done.stderr.strip().splitlines()[-6:])
    raise ConfigError(reason or f"{module} ended with exit code {done.returncode}")


def _answer(output: str) -> dict[str, str]:
    lines = output.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in answer.items()} if isinstance(answer, dict) else {}
