"""Starting programs inside the bed and waiting for them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from testbed.bed import Bed, BedError
from testbed.namespaces import Process, describe, entering, inside
from testbed.programs import Catalogue
from testbed.record import Record, save
from testbed.waiting import until

# The pid is written by the program's own process before it becomes the program.
BECOME = 'echo $$ >"$0.partial"; mv "$0.partial" "$0"; exec "$@"'


@dataclass
class Runner:
    """Starts programs of one bed and keeps its record."""

    bed: Bed
    catalogue: Catalogue
    record: Record

    def start(self, name: str, *arguments: str, ready: Callable[[], bool], seconds: float = 60) -> None:
        """Start a program unless it runs, and wait until it is ready. BedError with its log otherwise."""
        if not self.record.running(name):
            print(f"cluster: {name}", flush=True)
            self.record = self.record.having(name, self.spawn(name, arguments))
            save(self.bed, self.record)
        until(name, lambda: self.check(name, ready), seconds, lambda: self.tail(name))

    def spawn(self, name: str, arguments: tuple[str, ...]) -> Process:
        """A child of the first process, in a session of its own."""
        binary = self.catalogue.path(name)
        note = self.bed.state / f"{name}.pid"
        note.unlink(missing_ok=True)
        command = ["setsid", "--fork", "sh", "-c", BECOME, str(note), str(binary), *arguments]
        with (self.bed.log / f"{name}.log").open("a") as log:
            subprocess.run(
                entering(self.record.first, *command),
                env={**os.environ, "PATH": f"{binary.parent}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
            )
        until(f"the start of {name}", note.exists, 10)
        try:
            return describe(int(note.read_text()), inside(self.record.first))
        except FileNotFoundError as gone:
            raise BedError(f"{name} ended at once. {self.tail(name)}") from gone

    def check(self, name: str, ready: Callable[[], bool]) -> bool:
        """Readiness, or an error at once when the program has ended."""
        if not self.record.running(name):
            raise BedError(f"{name} has ended. {self.tail(name)}")
        return ready()

    def run(self, *command: str, stdin: str | None = None) -> str:
        """A command inside; its output. BedError with its errors."""
        done = subprocess.run(
            entering(self.record.first, *command), input=stdin, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise BedError(f"{' '.join(command[:3])}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def tail(self, name: str) -> str:
        """The end of a program's log."""
        path = self.bed.log / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"The end of {path}:", *lines])
