"""The last act: kill an engine, then stop and start everything, and see that turns still hit.

Called by the demo after the third replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvist_cli.demo.figures import Replay
from kvist_cli.demo.replay import Target
from kvist_cli.demo.trace import Trace, Turn
from kvist_cli.local import Urls

START_SECONDS = 600.0


class Running(Protocol):
    """The part of a local cluster that the demo needs."""

    urls: Urls

    def kill(self, program: str) -> int:
        """SIGKILL; it is started again by itself."""

    def wait_ready(self, program: str, deadline: float = START_SECONDS) -> float:
        """Seconds its start took."""

    def down(self, *, flush: bool = True) -> None:
        """Stop everything."""


@dataclass(frozen=True)
class Ending:
    """The turn that follows the kill, whose engine is killed, the turn after the restart of all."""

    after_kill: Turn
    replica: str
    after_restart: Turn


def ending(trace: Trace, replay: Replay) -> Ending:
    """The engine to kill is the one that answered a session most exclusively.

    What the other replica holds of a session would otherwise compete with the arena of the killed one,
    and the router might rightly send the next turn there.
    """
    turns = {turn: _replicas(replay, turn.session) for turn in trace.afterwards}
    ranked = sorted(turns, key=lambda turn: _exclusive(turns[turn]), reverse=True)
    return Ending(ranked[0], turns[ranked[0]][-1], ranked[-1])


def _replicas(replay: Replay, session: str) -> list[str]:
    """Where the session's turns were answered, in order."""
    return [turn.replica for turn in replay.turns if turn.turn.rsplit(".", 1)[0] == session]


def _exclusive(replicas: list[str]) -> tuple[float, int]:
    """Share and number of the turns that the last replica answered."""
    own = replicas.count(replicas[-1])
    return own / len(replicas), own


def kill_engine(cluster: Running, target: Target, replica: str) -> float:
    """Kill the replica's engine, wait until it is back and the router knows; returns seconds of its start."""
    program = "engine-" + replica.rsplit("-", 1)[-1]
    cluster.kill(program)
    seconds = cluster.wait_ready(program, START_SECONDS)
    target.wait_routable([replica])
    return seconds


def hit_from(hits: Mapping[str, int], tier: str) -> int:
    """Tokens that came from one tier."""
    return hits.get(tier, 0)
