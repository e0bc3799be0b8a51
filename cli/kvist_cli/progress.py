"""Shows what takes long: a cluster starting, running and stopping (`Progress`), a count (`Counting`), an
answer (`Waiting`).

A live table on a terminal, else one line an event; a bar or a clock on a terminal, else nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvist_cli.local import Event, EventKind

REMIND_SECONDS: Final = 10.0
_STYLES: Final = {
    EventKind.STARTING: "yellow",
    EventKind.READY: "green",
    EventKind.EXITED: "red",
    EventKind.RESTARTING: "yellow",
    EventKind.STOPPING: "yellow",
    EventKind.STOPPED: "dim",
    EventKind.FAILED: "bold red",
}
_BUSY: Final = (EventKind.STARTING, EventKind.RESTARTING, EventKind.STOPPING)


class Progress:
    """`on_event` may be called from any thread. The table lives inside `with`, which may be entered again;
    outside, and where there is no terminal, an event is a line. So an idle cluster draws nothing. Without
    a terminal a line every `remind_seconds` inside `with` says what is waited for.
    """

    def __init__(
        self,
        console: Console,
        remind_seconds: float = REMIND_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._remind_seconds = remind_seconds
        self._clock = clock
        self._over = threading.Event()
        self._reminder: threading.Thread | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[Event, float]] = {}
        self._live: Live | None = None
        self._spinner = Spinner("dots")

    def __enter__(self) -> Self:
        self._rows.clear()
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=8)
            self._live.start()
        else:
            self._over.clear()
            self._reminder = threading.Thread(target=self._remind_for_long, name="progress", daemon=True)
            self._reminder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._reminder is not None:
            self._over.set()
            self._reminder.join()
            self._reminder = None

    def on_event(self, event: Event) -> None:
        """Show what happened."""
        if event.program:
            with self._lock:
                self._rows[event.program] = (event, self._clock())
        if self._live is None or not event.program or event.kind in (EventKind.EXITED, EventKind.FAILED):
            self._console.print(_line(event), style=_STYLES.get(event.kind, ""), markup=False)

    def remind(self) -> None:
        """A line about the programs that are under way, if any."""
        with self._lock:
            rows = [(name, *row) for name, row in self._rows.items() if row[0].kind in _BUSY]
        if rows:
            parts = (
                f"{name} {event.kind.value} ({self._clock() - since:.0f} s)" for name, event, since in rows
            )
            self._console.print(f"waiting: {', '.join(parts)}", style="dim", markup=False)

    def _remind_for_long(self) -> None:
        while not self._over.wait(self._remind_seconds):
            self.remind()

    def _table(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        with self._lock:
            rows = list(self._rows.items())
        for name, (event, since) in rows:
            if event.kind is EventKind.NOTE:
                continue
            busy = event.kind in _BUSY
            seconds = self._clock() - since if busy else event.seconds
            table.add_row(
                self._spinner if busy else Text("●", style=_STYLES[event.kind]),
                name,
                Text(event.kind.value, style=_STYLES[event.kind]),
                Text(f"{seconds:6.1f} s" if busy or seconds else "", style="dim"),
                Text(event.message.split("\n", 1)[0], style="dim", overflow="ellipsis", no_wrap=True),
            )
        return Group(table)


class Waiting:
    """An answer that may take minutes: what is waited for and since when, on a terminal."""

    def __init__(self, console: Console, text: str) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bars.add_task(text, total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


class Counting:
    """Steps of known number, one row of them after the other."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._bars = Bars(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bars.add_task("reading", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """What is done now, while nobody knows how much of it there is."""
        self._bars.update(self._task, description=text)

    def start(self, text: str, total: int) -> None:
        """The next row."""
        self._bars.reset(self._task, description=text, total=total)

    def reached(self, number: int) -> None:
        """So many of them are done."""
        self._bars.update(self._task, completed=number)


def _line(event: Event) -> str:
    if not event.program:
        return event.message
    seconds = f" ({event.seconds:.1f} s)" if event.seconds else ""
    message = f": {event.message}" if event.message else ""
    kind = "" if event.kind is EventKind.NOTE else f" {event.kind.value}"
    return f"{event.program}{kind}{seconds}{message}"
