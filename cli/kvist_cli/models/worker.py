"""Runs one of the package's worker modules; its last line of output is a JSON object."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvist_connector.errors import ConfigError

REMIND_SECONDS: Final = 10.0

OnWait = Callable[[float], None]


def run_worker(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    deadline: float,
    on_wait: OnWait = lambda _: None,
    remind_seconds: float = REMIND_SECONDS,
) -> str:
    """The `path` of its answer; raises ConfigError with its `error`, or with the end of what it wrote.

    `on_wait` is told every so often how many seconds it has taken. Whatever ends this ends the worker.
    """
    command = [sys.executable, "-m", module, *arguments]
    child = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child:
        try:
            written, said = _output(child, module, deadline, on_wait, remind_seconds)
        finally:
            child.kill()
    answer = _answer(written)
    if child.returncode == 0 and "path" in answer:
        return answer["path"]
    reason = answer.get("error") or "\n".join(said.strip().splitlines()[-6:])
    raise ConfigError(reason or f"{module} ended with exit code {child.returncode}")


def _output(
    child: subprocess.Popen[str], module: str, deadline: float, on_wait: OnWait, remind_seconds: float
) -> tuple[str, str]:
    began = time.monotonic()
    while True:
        try:
            return child.communicate(timeout=min(remind_seconds, deadline))
        except subprocess.TimeoutExpired as error:
            taken = time.monotonic() - began
            if taken >= deadline:
                raise ConfigError(f"{module} did not end within {deadline:.0f} s") from error
            on_wait(taken)


def _answer(output: str) -> dict[str, str]:
    lines = output.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in answer.items()} if isinstance(answer, dict) else {}
