"""What a supervisor elsewhere does to its programs, read from its state. Used by `up --detach` and `down`."""

from __future__ import annotations

from typing import Final

from kvist_cli.local import Event, EventKind
from kvist_cli.local.state import ClusterState, Phase
from kvist_cli.progress import Progress

_KINDS: Final = {
    Phase.STARTING: EventKind.STARTING,
    Phase.READY: EventKind.READY,
    Phase.RESTARTING: EventKind.RESTARTING,
    Phase.STOPPING: EventKind.STOPPING,
    Phase.STOPPED: EventKind.STOPPED,
    Phase.FAILED: EventKind.FAILED,
}


def stopped(state: ClusterState) -> ClusterState:
    """The same after an end in order, of which the last state may not have been seen."""
    programs = tuple(program.model_copy(update={"phase": Phase.STOPPED}) for program in state.programs)
    return state.model_copy(update={"programs": programs})


def report(state: ClusterState, seen: dict[str, Phase], progress: Progress) -> None:
    """Show the phases that are not in `seen` yet."""
    for program in state.programs:
        if program.phase is not seen.get(program.name) and program.phase in _KINDS:
            seen[program.name] = program.phase
            progress.on_event(Event(_KINDS[program.phase], program.name, program.message))
