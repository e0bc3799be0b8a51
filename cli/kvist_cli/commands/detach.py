"""`kvist up --detach`: the supervisor as a process of its own, watched until all is ready."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO, Final

from rich.console import Console

from kvist_cli.commands.phases import report
from kvist_cli.local import ClusterError, Event, EventKind, Options
from kvist_cli.local.cluster import claim, start_deadline, unwritable
from kvist_cli.local.prepare import prepare, run_folder
from kvist_cli.local.state import ClusterState, Phase, RunFolder
from kvist_cli.local.supervisor import put_aside
from kvist_cli.progress import Progress
from kvist_operator.plan import Role
from kvist_operator.spec import CacheCluster

_POLL: Final = 0.2


def start_detached(file: Path, manifest: CacheCluster, options: Options, console: Console) -> None:
    """Check here, where messages can be seen; then start the supervisor and wait for it."""
    folder = RunFolder(run_folder(manifest.name, options, os.environ))
    with Progress(console) as progress:
        lock = claim(folder, manifest.name, options, progress.on_event)
        try:
            prepared = prepare(manifest, options, os.environ, progress.on_event)
        finally:
            lock.release()
        log = folder.path / "logs" / "supervisor.log"
        with _opened(log, folder) as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "kvist_cli", "up", "--file", str(file.absolute()), *flags(options)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + start_deadline(prepared.processes)
        try:
            state = _watch(child, folder, progress, deadline, log)
        except KeyboardInterrupt:
            _end(child, options, progress)
            raise
    url = next((p.url for p in state.programs if p.role is Role.ROUTER), "")
    console.print(f"ready: {url}/v1  (supervisor pid {child.pid}; end it with `kvist down {manifest.name}`)")


def _opened(log: Path, folder: RunFolder) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        put_aside(log)
        return log.open("ab")
    except OSError as error:
        raise unwritable(folder.path, error) from error


def _end(child: subprocess.Popen[bytes], options: Options, progress: Progress) -> None:
    """Who interrupts a start does not want it to go on unseen: SIGTERM is the supervisor's Ctrl-C."""
    progress.on_event(Event(EventKind.NOTE, "", "interrupted: the supervisor ends what it has started"))
    child.terminate()
    try:
        child.wait(3 * options.stop_deadline + options.flush_deadline)
    except subprocess.TimeoutExpired:
        progress.on_event(Event(EventKind.NOTE, "", f"supervisor (pid {child.pid}) does not end"))


def flags(options: Options) -> list[str]:
    """The options as flags of `kvist up`, for a process that gets the same ones."""
    values = options.model_dump(mode="json")
    ports: dict[str, int] = values.pop("ports")
    named = {**values, **{f"port-{name}": port for name, port in ports.items()}}
    return [
        part
        for name, value in named.items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


def _watch(
    child: subprocess.Popen[bytes], folder: RunFolder, progress: Progress, deadline: float, log: Path
) -> ClusterState:
    seen: dict[str, Phase] = {}
    while time.monotonic() < deadline:
        state = folder.read()
        if state is not None and state.supervisor.pid == child.pid:
            report(state, seen, progress)
            if all(p.phase is Phase.READY for p in state.programs):
                return state
        if child.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise ClusterError(
                f"the supervisor ended with exit code {child.returncode}; end of {log}:\n{tail}"
            )
        time.sleep(_POLL)
    raise ClusterError(f"not ready in time; it goes on in the background, see {log}")
