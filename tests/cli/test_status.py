"""`kvist status` of a cluster that is only starting."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from kvist_cli.commands.status import STARTING, gather, show
from kvist_cli.commands.up import curl_line
from kvist_cli.local.identity import identify
from kvist_cli.local.state import VERSION, ClusterState, Phase, ProgramState
from kvist_connector.log_lines import plain
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


@pytest.mark.parametrize("name", ["m", "a[/b]", "[red]x", "it's\x1b[2J", "'; true #"])
def test_a_model_of_any_name_is_shown_and_asked_for_as_it_is(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"name": "demo", "model": name, "endpoint": URL, "logs": "/l", "programs": [], "hits": None}
    show(report | {"supervisor": {"pid": 1, "alive": True}, "agents": {}, "router": {"error": STARTING}})
    assert plain(name) in capsys.readouterr().out
    asked = json.loads(shlex.split(curl_line(URL, name, keys=True))[-1])
    assert asked["model"] == name
