"""The last act: kill an engine, then stop and start everything, and see that turns still hit.

Called by the demo after the third replay.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def last_replica(replay: Replay, session: str) -> str:
    """Where the session's latest turn was answered."""
    return next(turn.replica for turn in reversed(replay.turns) if turn.turn.startswith(f"{session}."))


def kill_engine(cluster: Running, target: Target, replica: str) -> float:
    """Kill the replica's engine, wait until it is back and the router knows; returns seconds of its start."""
    program = "engine-" + replica.rsplit("-", 1)[-1]
    cluster.kill(program)
    seconds = cluster.wait_ready(program, START_SECONDS)
    target.wait_routable([replica])
    return seconds


def afterwards(trace: Trace, index: int) -> Turn:
    """The turn that follows the kill (0) or the restart of everything (1)."""
    return trace.afterwards[min(index, len(trace.afterwards) - 1)]


def hit_from(hits: Mapping[str, int], tier: str) -> int:
    """Tokens that came from one tier."""
    return hits.get(tier, 0)
