"""`kvist status` of a cluster that is only starting."""

from __future__ import annotations

import os
from pathlib import Path

from kvist_cli.commands.status import STARTING, gather
from kvist_cli.local.identity import identify
from kvist_cli.local.state import VERSION, ClusterState, Phase, ProgramState
from kvist_operator.plan import Role

# Nobody is asked there: a question would fail in other words.
URL = "http://127.0.0.1:1"


def program(name: str, role: Role, phase: Phase) -> ProgramState:
    return ProgramState(
        name=name,
        role=role,
        replica="" if role is Role.ROUTER else "replica-0",
        phase=phase,
        identity=None,
        restarts=0,
        url=URL,
        ports={},
        log=Path("/logs") / name,
        arena=None,
        message="",
    )


def test_programs_that_start_are_said_to_and_not_asked() -> None:
    supervisor = identify(os.getpid())
    assert supervisor is not None
    roles = {"agent-0": Role.AGENT, "engine-0": Role.ENGINE, "router": Role.ROUTER}
    programs = tuple(program(name, role, Phase.STARTING) for name, role in roles.items())
    report = gather(
        ClusterState(
            version=VERSION,
            name="demo",
            model="m",
            supervisor=supervisor,
            programs=programs,
            admin_url=URL,
        )
    )
    assert report["agents"] == {"replica-0": {"error": STARTING}}
    assert report["router"] == {"error": STARTING}
    assert report["hits"] is None
    assert report["healthy"] is False
