"""Kills a program at every line of what writes in the agent: before, between and after all that it writes.

Points are found by running the work once and counting lines, so that what is written in a new place is
killed there too. Each point is a fork of this process.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import kvist_connector

PACKAGE = Path(kvist_connector.__file__).parent
# Whoever writes to files or to the arena, itself or through one of these.
WRITERS = frozenset(
    str(path)
    for pattern in ("arena/*.py", "agent/*.py")
    for path in PACKAGE.glob(pattern)
    if any(
        sign in path.read_text() for sign in ("import os", "pack_into", "_view", "_journal", "write_bytes")
    )
)
MOST_POINTS = 5000
Work = Callable[[Path], Callable[[], None]]


class Tracer:
    """Counts lines of whatever writes; dies at the `fatal` one."""

    def __init__(self, fatal: int = 0) -> None:
        self.lines = 0
        self._fatal = fatal

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Tracer | None:
        if frame.f_code.co_filename not in WRITERS:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def died(work: Callable[[], None], fatal: int) -> bool:
    """In a fork: whether it was killed, or has run to its end without having so many lines."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sys.settrace(Tracer(fatal))
            work()
            sys.settrace(None)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the work itself has failed"
    return os.WIFSIGNALED(status)


def killed_everywhere(prepared: Path, folder: Path, work: Work, step: int = 1) -> Iterator[tuple[Path, bool]]:
    """Copies of the prepared folder in which the work was killed at a point each, then one in which it was
    not; whether it was. `work(copy)` opens what it needs and returns what is killed."""
    for point in range(1, MOST_POINTS, step):
        copy = folder / str(point)
        shutil.copytree(prepared, copy)
        killed = died(_begun(work, copy), point)
        yield copy, killed
        shutil.rmtree(copy)
        if not killed:
            return
    raise AssertionError(f"more than {MOST_POINTS} points")


def _begun(work: Work, copy: Path) -> Callable[[], None]:
    def run() -> None:
        tracer = sys.gettrace()
        sys.settrace(None)
        ready = work(copy)
        sys.settrace(tracer)
        ready()

    return run
