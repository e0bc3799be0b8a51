"""The conversation of the demo: who says what in which order.

Called by the replay. Pure but for reading the package's own trace.yaml. All replays send equal
prompts: the answers in a history are the model's own of the first replay, kept by turn name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from kvist_cli.demo.errors import DemoError

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """One question of one session. `name` is "session.number", counted from 1."""

    session: str
    number: int
    text: str

    @property
    def name(self) -> str:
        """Unique in the trace; also what the table and the JSON show."""
        return f"{self.session}.{self.number}"

    @property
    def warm(self) -> bool:
        """Whether the whole history of this turn was sent before."""
        return self.number > 1


@dataclass(frozen=True)
class Trace:
    """The turns in order of arrival, and one more per session for the restarts at the end."""

    system: str
    max_tokens: int
    turns: tuple[Turn, ...]
    afterwards: tuple[Turn, ...]

    def messages(self, turn: Turn, answers: Mapping[str, str]) -> list[Message]:
        """What a client sends for `turn`; `answers` must hold those of the session's turns before it."""
        messages = [{"role": "system", "content": self.system}]
        for earlier in self.turns:
            if earlier.session == turn.session and earlier.number < turn.number:
                messages += [_says("user", earlier.text), _says("assistant", answers[earlier.name])]
        return [*messages, _says("user", turn.text)]

    @property
    def text(self) -> str:
        """Everything that is said, without answers."""
        return "\n\n".join([self.system, *(turn.text for turn in self.turns)])

    def whole_sessions(self, answers: Mapping[str, str]) -> list[list[Message]]:
        """Every session with its last answer."""
        last = {turn.session: turn for turn in self.turns}
        return [
            [*self.messages(turn, answers), _says("assistant", answers[turn.name])] for turn in last.values()
        ]


def _says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def load() -> Trace:
    """The trace that ships with the package."""
    return parse(yaml.safe_load(resources.files("kvist_cli.demo").joinpath("trace.yaml").read_text()))


def shortened(trace: Trace, sessions: int) -> Trace:
    """The first sessions only: for a quick look."""
    names = list(dict.fromkeys(turn.session for turn in trace.turns))[:sessions]
    kept = tuple(turn for turn in trace.turns if turn.session in names)
    after = tuple(turn for turn in trace.afterwards if turn.session in names)
    return Trace(trace.system, trace.max_tokens, kept, after)


def parse(data: Mapping[str, Any]) -> Trace:
    """A trace from the file's data; raises DemoError when order and sessions disagree."""
    texts = {
        session["name"]: [_text(turn, data["documents"]) for turn in session["turns"]]
        for session in data["sessions"]
    }
    seen = dict.fromkeys(texts, 0)
    turns: list[Turn] = []
    for name in data["order"]:
        if seen.get(name, 0) >= len(texts.get(name, ())):
            raise DemoError(f"trace: order names {name!r} more often than it has turns")
        turns.append(Turn(name, seen[name] + 1, texts[name][seen[name]]))
        seen[name] += 1
    left = [name for name, count in seen.items() if count < len(texts[name])]
    if left:
        raise DemoError(f"trace: order leaves out turns of {', '.join(left)}")
    after = tuple(Turn(name, seen[name] + 1, text) for name, text in data["afterwards"].items())
    return Trace(data["system"].strip(), data["max_tokens"], tuple(turns), after)


def _text(turn: Mapping[str, str], documents: Mapping[str, str]) -> str:
    text = turn["text"].strip()
    document = turn.get("document")
    return f"{documents[document].strip()}\n\n{text}" if document else text
