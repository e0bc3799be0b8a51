"""`kvist down`: end a cluster of this machine, whoever started it, also after its supervisor was killed."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated, Final

import typer
from rich.console import Console

from kvist_cli import target
from kvist_cli.commands.options import ClusterName, FlushDeadline, RunDir, StopDeadline
from kvist_cli.commands.phases import report, stopped
from kvist_cli.local import ClusterError, Options, leftovers
from kvist_cli.local.identity import alive
from kvist_cli.local.state import ClusterState, RunFolder
from kvist_cli.output import console
from kvist_cli.progress import Progress
from kvist_connector.settings import validate

EXAMPLES: Final = """
Examples:

  kvist down

  kvist down demo --no-flush

Stops router and engines, lets agents write to disk what is on its way, stops them, removes the memory tier.
"""
_POLL: Final = 0.1


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("down", epilog=EXAMPLES)(down)


def down(
    name: ClusterName = None,
    run_dir: RunDir = None,
    flush: Annotated[
        bool, typer.Option("--flush/--no-flush", help="Write to disk what is on its way.")
    ] = True,
    stop_deadline: StopDeadline = 30.0,
    flush_deadline: FlushDeadline = 60.0,
) -> None:
    """End a cluster: engines, flush, agents, memory tier."""
    options = validate(Options, {"stop_deadline": stop_deadline, "flush_deadline": flush_deadline})
    folder = target.find(name, run_dir, os.environ)
    state = target.read(folder)
    out = console()
    if folder.locked() and alive(state.supervisor):
        _ask_supervisor(state, folder, options, out, flush=flush)
    _end_leftovers(folder, options, out, flush=flush)
    out.print(f"{state.name} is down")


def _ask_supervisor(
    state: ClusterState, folder: RunFolder, options: Options, out: Console, *, flush: bool
) -> None:
    """SIGTERM is its Ctrl-C; twice is at once."""
    out.print(f"supervisor (pid {state.supervisor.pid}) is stopping {state.name}")
    os.kill(state.supervisor.pid, signal.SIGTERM)
    if not flush:
        time.sleep(_POLL)
        os.kill(state.supervisor.pid, signal.SIGTERM)
    end = time.monotonic() + 3 * options.stop_deadline + options.flush_deadline
    seen = {program.name: program.phase for program in state.programs}
    with Progress(out) as progress:
        while alive(state.supervisor):
            if time.monotonic() > end:
                out.print("supervisor does not end, killing it")
                os.kill(state.supervisor.pid, signal.SIGKILL)
                break
            if (now := folder.read()) is not None:
                report(now, seen, progress)
            time.sleep(_POLL)
        if folder.read() is None:
            report(stopped(state), seen, progress)


def _end_leftovers(folder: RunFolder, options: Options, out: Console, *, flush: bool) -> None:
    state = folder.read()
    if state is None:
        return
    end = time.monotonic() + options.stop_deadline
    while (lock := folder.lock()) is None:
        if time.monotonic() > end:
            raise ClusterError(f"{folder.path} is held by another process; try again")
        time.sleep(_POLL)
    try:
        with Progress(out) as progress:
            leftovers.end(state, folder, options, flush=flush, on_event=progress.on_event)
    finally:
        lock.release()
