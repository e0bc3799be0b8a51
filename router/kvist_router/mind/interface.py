"""What travels between relay and mind. Every argument and answer is serialisable (msgspec).

    relay                               mind
      | decide(body, metadata)  ---->    |   Decision or Refusal
      | report(id, first_byte)  ---->    |   the engine took it, and its prefill is over
      | report(id, ended | cancelled | failed)   exactly one of them, last

`failed` may be followed by `decide` with `metadata.id` and `metadata.exclude`: a retry elsewhere.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

# What a body is: `tokens` are /tokenize and /detokenize, `stored` asks for a response that was kept.
Path = Literal["chat", "completions", "responses", "embeddings", "tokens", "stored"]
Event = Literal["first_byte", "ended", "cancelled", "failed"]


class Metadata(msgspec.Struct, frozen=True):
    """What the mind needs beside the body."""

    path: Path
    tenant: str = ""
    id: str = ""  # set on a retry: the id of the first decision
    exclude: tuple[str, ...] = ()  # replicas that failed this request
    response: str = ""  # of a stored response: its id
    skimmed: bool = False  # the body lacks its long strings, so nobody can tell its tokens


class Decision(msgspec.Struct, frozen=True, tag=True, tag_field="answer"):
    """Where to send the request."""

    id: str
    replica: str
    url: str
    predicted_tokens: int  # of the prompt that will not be computed
    prompt_tokens: int
    stream: bool
    body: bytes | None = None  # replaces the client's body; None: unchanged bytes
    context_tokens: int = 0  # most tokens of prompt and answer together; 0: not known
    routed_by: str = ""  # what chose it, when that was not the mind


class Refusal(msgspec.Struct, frozen=True, tag=True, tag_field="answer"):
    """The error that the client gets, in OpenAI's form."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds


class Report(msgspec.Struct, frozen=True):
    """Progress of a request. `unreachable`: the engine could not be connected to; `tokens` of the answer."""

    event: Event
    error: str = ""
    unreachable: bool = False
    tokens: int = 0


class Known(msgspec.Struct, frozen=True):
    """A replica that requests may go to."""

    name: str
    url: str
    models: tuple[str, ...]


class View(msgspec.Struct, frozen=True):
    """What relays know of the mind's world while they ask it nothing."""

    problem: str  # why requests should not come here (readiness.py); empty when they may
    models: dict[str, int | None]  # longest context of each
    replicas: tuple[Known, ...]
    names: tuple[str, ...]  # of all replicas, healthy or not


class Outlook(Protocol):
    """What the endpoint answers of its own, without waiting for anything."""

    def view(self) -> View:
        """The mind's, now or as it was last told; `problem` is this process' own."""

    def degraded(self) -> str:
        """What is not as it should be though requests are served; empty when nothing is."""

    def stop(self) -> None:
        """The router is about to end: from now on there is a problem."""


class Mind(Protocol):
    """Both forms, in-process and over a socket, behave the same (tests/router/test_mind_conformance.py)."""

    async def decide(self, body: bytes, metadata: Metadata) -> Decision | Refusal:
        """Choose a replica. Never raises for bad input; a Refusal says what to answer."""

    async def report(self, request_id: str, report: Report) -> None:
        """Tell what became of a decision. Unknown ids are ignored: the record may be gone."""
