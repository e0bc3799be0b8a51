"""Which engine is killed at the end of the demo, and which turns follow."""

from __future__ import annotations

from kvist_cli.demo import trace
from kvist_cli.demo.ending import ending
from kvist_cli.demo.figures import Replay, TurnResult


def played(**replicas: str) -> Replay:
    """Turns by session, each answered where its letter says."""
    turns = [
        TurnResult(f"{session}.{number}", f"replica-{letter}", number > 1, 100, 10, 0, {}, 0.1, ())
        for session, letters in replicas.items()
        for number, letter in enumerate(letters, 1)
    ]
    return Replay("kvist", tuple(turns), 1.0)


EVENLY = {"bicycles": "abab", "staff": "bab", "claim": "abab", "school": "bab", "minutes": "aab"}


def test_the_killed_engine_answered_all_turns_of_the_session_that_goes_on() -> None:
    last = ending(trace.load(), played(works="abbb", **{**EVENLY, "school": "aaa"}))
    assert (last.after_kill.name, last.replica) == ("school.4", "replica-a")


def test_of_several_such_sessions_the_longest_goes_on() -> None:
    last = ending(trace.load(), played(works="bbbb", **{**EVENLY, "school": "aaa"}))
    assert (last.after_kill.name, last.replica) == ("works.5", "replica-b")


def test_another_session_goes_on_after_the_restart_of_everything() -> None:
    last = ending(trace.load(), played(works="abab", **EVENLY))
    assert last.after_kill.session != last.after_restart.session


def test_every_session_can_go_on() -> None:
    whole = trace.load()
    assert {turn.session for turn in whole.afterwards} == {turn.session for turn in whole.turns}
