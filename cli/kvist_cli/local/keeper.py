"""One program's life: start, health, exit, back-off, start again. Runs in the supervisor's loop.

Invariant: between two starts nothing of the former process's session is alive, so a new
process finds its ports and files free.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvist_cli.local.events import Event, EventKind
from kvist_cli.local.health import healthy
from kvist_cli.local.identity import LOG_VARIABLE, Identity, end_all, identify, send
from kvist_cli.local.options import Options
from kvist_cli.local.state import Phase, ProgramState
from kvist_connector.errors import KvistError
from kvist_operator.render.local import Process

_LONGEST_BACKOFF: Final = 30.0
_LOG_LINES: Final = 12
_ORPHAN_DEADLINE: Final = 3.0


class ClusterError(KvistError):
    """The cluster could not do it; the text says which program, why, and where its log is."""


class Keeper:
    """Keeps one process running until told to stop. All methods belong to the loop's thread."""

    def __init__(
        self,
        process: Process,
        environment: Mapping[str, str],
        options: Options,
        emit: Callable[[Event], None],
        changed: Callable[[], None],
    ) -> None:
        self.process = process
        self.phase = Phase.WAITING
        self.identity: Identity | None = None
        self.message = ""
        self.restarts = 0
        self.start_seconds = 0.0
        self._environment = environment
        self._options = options
        self._emit = emit
        self._changed = changed
        self._failures = 0
        self._worked = False
        self._stopping = False
        self._wake = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._child: asyncio.subprocess.Process | None = None

    def state(self) -> ProgramState:
        """Snapshot for state.json."""
        p = self.process
        return ProgramState(
            name=p.name,
            role=p.role,
            replica=p.replica,
            phase=self.phase,
            identity=self.identity,
            restarts=self.restarts,
            url=p.url,
            ports=dict(p.ports),
            log=p.log,
            arena=p.arena,
            message=self.message,
        )

    def start(self) -> None:
        """Begin to keep it running; returns at once."""
        self.phase = Phase.WAITING
        self._stopping = False
        self._failures = 0
        self._task = asyncio.create_task(self._run(), name=self.process.name)

    async def ready(self) -> None:
        """Wait until it is healthy; raises ClusterError when it was given up or stopped."""
        async with self._wake:
            await self._wake.wait_for(lambda: self.phase in (Phase.READY, Phase.FAILED, Phase.STOPPED))
        if self.phase is not Phase.READY:
            raise ClusterError(f"{self.process.name} {self.phase}: {self.message}")

    async def stop(self) -> None:
        """SIGTERM, after the deadline SIGKILL; returns when nothing of it is left. Safe to call twice."""
        self._stopping = True
        if self._task is None or self._task.done():
            return
        await self._set(Phase.STOPPING, EventKind.STOPPING, "")
        if self._child is not None and self._child.returncode is None:
            with suppress(ProcessLookupError):
                self._child.terminate()
        # wait() and not await: who stops waiting must not cancel the life itself.
        done, _ = await asyncio.wait([self._task], timeout=self._options.stop_deadline)
        if not done:
            self.kill_now()
            await asyncio.wait([self._task])

    async def kill(self) -> int:
        """SIGKILL to its whole session; returns the dead pid once the exit was noticed."""
        identity = self.identity
        if identity is None:
            raise ClusterError(f"{self.process.name} is not running, it is {self.phase}")
        self.kill_now()
        async with self._wake:
            await self._wake.wait_for(lambda: self.identity != identity)
        return identity.pid

    def kill_now(self) -> None:
        """SIGKILL to its whole session."""
        if self.identity is not None:
            send(self.identity, signal.SIGKILL, spare_trackers=True)

    async def _run(self) -> None:
        while not self._stopping:
            await self._once()
            if self._stopping:
                break
            self._failures += 1
            # What never worked is not tried again: a wrong flag stays wrong, and its message must be seen.
            if not self._worked or self._failures > self._options.restarts:
                await self._set(Phase.FAILED, EventKind.FAILED, self._why_given_up())
                return
            await self._back_off()
        await self._set(Phase.STOPPED, EventKind.STOPPED, "")

    def _why_given_up(self) -> str:
        if not self._worked:
            return "given up: it never was healthy"
        return f"given up after {self._failures} failures in a row"

    async def _once(self) -> None:
        """One process from start to end."""
        started = time.monotonic()
        try:
            child = await self._spawn()
        except OSError as error:
            await self._clean_up(f"cannot be started: {error}")
            return
        exited = asyncio.create_task(child.wait())
        probe = asyncio.create_task(healthy(self.process.health_url))
        try:
            await asyncio.wait(
                {exited, probe},
                timeout=self.process.start_deadline,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if probe.done() and not exited.done():
                self._failures, self._worked = 0, True
                self.start_seconds = time.monotonic() - started
                await self._set(Phase.READY, EventKind.READY, "", self.start_seconds)
                await exited
                await self._clean_up(f"ended with {_status(child.returncode)}")
            elif exited.done():
                await self._clean_up(f"ended with {_status(child.returncode)} before it was healthy")
            else:
                self.kill_now()
                await exited
                await self._clean_up(f"not healthy after {self.process.start_deadline:g} s")
        finally:
            probe.cancel()

    async def _spawn(self) -> asyncio.subprocess.Process:
        process = self.process
        for folder in process.folders:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path, text in process.files.items():
            keep_text(path, text)
        # A session of its own: Ctrl-C in the terminal reaches only us, and we end children in order.
        with process.log.open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *process.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._child_environment(),
                start_new_session=True,
            )
        self._child = child
        self.identity = identify(child.pid) or Identity(pid=child.pid, start=0, boot="")
        await self._set(Phase.STARTING, EventKind.STARTING, f"pid {child.pid}, log {process.log}")
        return child

    def _child_environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in self._environment.items() if k not in self.process.unset}
        return {**inherited, **self.process.env, LOG_VARIABLE: str(self.process.log)}

    async def _clean_up(self, reason: str) -> None:
        identity, self.identity, self._child = self.identity, None, None
        if identity is not None:
            # Children that outlived their leader would hold its ports: they are asked, then killed.
            await asyncio.to_thread(end_all, [identity], _ORPHAN_DEADLINE)
        if not self._stopping:
            self.message = f"{reason}; last lines of {self.process.log}:\n{log_tail(self.process)}"
            await self._set(Phase.RESTARTING, EventKind.EXITED, f"{reason}, log {self.process.log}")

    async def _back_off(self) -> None:
        pause = min(_LONGEST_BACKOFF, self._options.backoff * 2 ** (self._failures - 1))
        await self._set(Phase.RESTARTING, EventKind.RESTARTING, "", pause)
        async with self._wake:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait_for(lambda: self._stopping), pause)
        self.restarts += 1

    async def _set(self, phase: Phase, kind: EventKind, message: str, seconds: float = 0.0) -> None:
        if self._stopping and phase is Phase.READY:
            return
        self.phase = phase
        self._changed()
        self._emit(Event(kind, self.process.name, message, seconds))
        async with self._wake:
            self._wake.notify_all()


def keep_text(path: Path, text: str) -> None:
    """Nothing is written where it is so already: a full disk is no reason not to start a program again."""
    with suppress(OSError, UnicodeDecodeError):
        if path.read_text() == text:
            return
    path.write_text(text)


def log_tail(process: Process) -> str:
    """The last lines of its log."""
    try:
        with process.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error.strerror})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-_LOG_LINES:]) or "  (empty)"


def _status(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
