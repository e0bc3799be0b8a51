"""What a supervisor that was killed left running: found by state.json, ended in order."""

from __future__ import annotations

import asyncio

from kvist_cli.local.agents import flush_agents, remove_arena
from kvist_cli.local.events import Event, EventKind, OnEvent
from kvist_cli.local.identity import alive, end_all, find_by_log, members
from kvist_cli.local.options import Options
from kvist_cli.local.state import ClusterState, ProgramState, RunFolder
from kvist_operator.plan import Role


def found(state: ClusterState) -> ClusterState:
    """The state with the programs that were started in the moment before their pid could be written."""
    programs = tuple(
        p
        if p.identity is not None and alive(p.identity)
        else p.model_copy(update={"identity": find_by_log(p.log) or p.identity})
        for p in state.programs
    )
    return state.model_copy(update={"programs": programs})


def running(state: ClusterState) -> list[ProgramState]:
    """Programs of which any process lives."""
    return [p for p in state.programs if p.identity is not None and members(p.identity)]


def end(state: ClusterState, folder: RunFolder, options: Options, *, flush: bool, on_event: OnEvent) -> None:
    """End router and engines, flush and end agents, remove the arenas, forget the state.

    The caller holds the folder's lock.
    """
    state = found(state)
    _end(state, (Role.ROUTER,), options, on_event)
    _end(state, (Role.ENGINE,), options, on_event)
    if flush:
        urls = {p.name: p.url for p in running(state) if p.role is Role.AGENT}
        asyncio.run(flush_agents(urls, options.flush_deadline, on_event))
    _end(state, (Role.AGENT,), options, on_event)
    for program in state.programs:
        if program.arena is not None:
            remove_arena(program.arena)
    folder.forget()


def _end(state: ClusterState, roles: tuple[Role, ...], options: Options, on_event: OnEvent) -> None:
    programs = [p for p in running(state) if p.role in roles]
    for program in programs:
        on_event(Event(EventKind.STOPPING, program.name, "left by a supervisor that is gone"))
    end_all([p.identity for p in programs if p.identity is not None], options.stop_deadline)
    for program in programs:
        on_event(Event(EventKind.STOPPED, program.name, ""))
