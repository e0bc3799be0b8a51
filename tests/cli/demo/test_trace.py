"""The shipped conversation: sizes, order, and histories that every replay sends alike."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from kvist_cli.demo import trace
from kvist_cli.demo.errors import DemoError

FILE = Path(trace.__file__).parent / "trace.yaml"


def test_sessions_are_interleaved_and_each_turn_is_asked_once(whole: trace.Trace) -> None:
    names = [turn.name for turn in whole.turns]
    assert len(names) == len(set(names)) >= 18
    sessions = [turn.session for turn in whole.turns]
    assert len(set(sessions)) >= 4
    assert sum(a != b for a, b in itertools.pairwise(sessions)) > len(sessions) // 2


def test_every_session_starts_with_the_same_long_system_prompt(whole: trace.Trace) -> None:
    answers = {turn.name: "yes" for turn in whole.turns}
    first = {message["content"] for turn in whole.turns for message in whole.messages(turn, answers)[:1]}
    assert len(first) == 1
    assert len(first.pop().split()) > 1100  # some 1,800 tokens


def test_a_history_holds_the_given_answers_in_order(whole: trace.Trace) -> None:
    answers = {turn.name: f"answer to {turn.name}" for turn in whole.turns}
    last = next(turn for turn in reversed(whole.turns) if turn.session == "works")
    messages = whole.messages(last, answers)
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * (last.number - 1), "user"]
    assert [m["content"] for m in messages[2::2]] == [f"answer to works.{n}" for n in range(1, last.number)]


def test_a_turn_with_a_document_carries_its_text(whole: trace.Trace) -> None:
    first = next(turn for turn in whole.turns if turn.name == "works.1")
    assert first.text.startswith("NOTICE TO PASSENGERS")


def test_only_first_turns_are_cold(whole: trace.Trace) -> None:
    assert {turn.number for turn in whole.turns if not turn.warm} == {1}


def test_a_quick_trace_keeps_order_and_whole_sessions(whole: trace.Trace) -> None:
    short = trace.shortened(whole, 2)
    assert {turn.session for turn in short.turns} == {"works", "bicycles"}
    assert [turn for turn in whole.turns if turn in short.turns] == list(short.turns)
    assert short.afterwards


@pytest.mark.parametrize(
    ("order", "message"),
    [(["works"], "leaves out turns of"), (["works"] * 5, "more often than it has turns")],
)
def test_an_order_that_does_not_fit_the_sessions_is_refused(order: list[str], message: str) -> None:
    data = yaml.safe_load(FILE.read_text()) | {"order": order}
    with pytest.raises(DemoError, match=message):
        trace.parse(data)
