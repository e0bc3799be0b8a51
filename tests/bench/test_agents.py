"""bench.agents: traces are made smaller and keep what they share; the figures of a form."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bench import agents

TEXT = st.text(alphabet="abc ", max_size=5000)


@given(TEXT, TEXT, TEXT)
def test_prompts_that_begin_alike_still_do(shared: str, first: str, second: str) -> None:
    whole = len(shared) // agents.BLOCK  # blocks that both have whole
    kept = min(agents.MOST_CHARACTERS, whole * round(agents.BLOCK * agents.SCALE))
    one, two = agents.smaller(shared + first), agents.smaller(shared + second)
    assert one[:kept] == two[:kept]
    assert len(one) <= agents.MOST_CHARACTERS


def test_sessions_are_in_the_order_of_their_requests_without_empty_ones(tmp_path: Path) -> None:
    lines = [
        {"timestamp": number, "session_id": "ab"[number % 2], "input": f"p{number}" if number != 2 else ""}
        for number in range(8)
    ]
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    found = agents.read(path, sessions=2, turns=3)
    assert [session.prompts for session in found] == [("p0", "p4", "p6"), ("p1", "p3", "p5")]
    assert [session.begin for session in found] == [0, 1]
    assert len(agents.read(path, sessions=1, turns=9)) == 1


def test_hits_are_shares_of_all_prompt_tokens_and_a_form_survives_its_file() -> None:
    answers = (agents.Answer(2.0, 1000, {"gpu": 100, "disk": 200}), agents.Answer(1.0, 1000, {}))
    played = agents.Played("Kvist", 4.0, 60.0, answers)
    assert (played.share(), played.share("gpu"), played.rate) == (0.15, 0.05, 0.5)
    assert msgspec.json.decode(msgspec.json.encode(played), type=agents.Played) == played
