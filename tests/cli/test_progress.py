"""What is said while a cluster starts and nobody sees a live table."""

from __future__ import annotations

import io
import threading

from rich.console import Console

from kvist_cli.local import Event, EventKind
from kvist_cli.progress import Progress


def test_without_a_terminal_a_line_says_what_is_waited_for_and_how_long_already() -> None:
    out, now = io.StringIO(), [100.0]
    progress = Progress(Console(file=out, soft_wrap=True), clock=lambda: now[0])
    progress.on_event(Event(EventKind.READY, "agent-0", "", 0.5))
    progress.on_event(Event(EventKind.STARTING, "engine-0", "pid 1"))
    now[0] += 5
    progress.on_event(Event(EventKind.STARTING, "engine-1", "pid 2"))
    now[0] += 20
    progress.remind()
    assert out.getvalue().splitlines()[-1] == "waiting: engine-0 starting (25 s), engine-1 starting (20 s)"
    progress.on_event(Event(EventKind.READY, "engine-0", "", 30.0))
    progress.on_event(Event(EventKind.READY, "engine-1", "", 30.0))
    said = out.getvalue()
    progress.remind()
    assert out.getvalue() == said


def test_it_is_said_again_and_again_until_the_end_and_never_after_it() -> None:
    class Lines(io.StringIO):
        def write(self, text: str) -> int:
            if "waiting:" in text:
                reminded.release()
            return super().write(text)

    reminded, out = threading.Semaphore(0), Lines()
    with Progress(Console(file=out, soft_wrap=True), remind_seconds=0.01) as progress:
        progress.on_event(Event(EventKind.STARTING, "engine-0", "pid 1"))
        for _ in range(2):
            assert reminded.acquire(timeout=30)
    assert progress_threads() == []


def progress_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "progress"]
