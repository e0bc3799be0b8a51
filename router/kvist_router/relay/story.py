"""A streamed answer that may go on at another replica: what its events have told so far.

The engine was asked for token ids beside the text; they are taken out again, so that the client sees what it
would have seen. Events go out whole, and with one name, whoever told them. Called by relay/app.py.

    told    tokens whose text the client has
    ahead   later ones without text yet: part of a character is held back by the engine, so they are made anew
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvist_router.errors import UpstreamError
from kvist_router.relay.continuation import Continuable

MAX_EVENT_BYTES: Final = 2**20
TAIL_TOKENS: Final = 8  # no character has more bytes, so the last tokens show whether it is whole
_HEAD: Final = ("id", "created", "model", "object")
_DONE: Final = b"[DONE]"


class _Detokenized(msgspec.Struct):
    prompt: str


class Story:
    """Events in, events out; `resume` is the request for the rest."""

    def __init__(self, asked: Continuable) -> None:
        self.obstacle = ""  # why nobody else can go on
        self.done = False  # the stream has said that it is over
        self.fault: UpstreamError | None = None  # of the engine that tells it now
        self._asked = asked
        self._rest = b""
        self._head: dict[str, Any] = {}
        self._prompt: array[int] | None = None
        self._told = array("I")
        self._ahead = array("I")
        self._before = 0  # tokens told by earlier replicas
        self._resumed = False

    @property
    def body(self) -> bytes:
        """The request for all of it."""
        return self._asked.body

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self._told) + len(self._ahead)

    @property
    def tail(self) -> list[int]:
        """The last tokens told; empty: none."""
        return self._told[-TAIL_TOKENS:].tolist()

    def feed(self, piece: bytes) -> bytes:
        """Whole events for the client; `fault` is set when no more are to come from this engine."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        found: list[bytes] = []
        try:
            found.extend(self._retold(events))
            if len(self._rest) > MAX_EVENT_BYTES:
                raise UpstreamError(f"an event of over {MAX_EVENT_BYTES} bytes")
        except UpstreamError as error:
            self.fault = error
        return b"".join(found)

    def ended(self) -> None:
        """No more pieces; raises UpstreamError if that is too early and somebody could go on."""
        if not self.done and not self.why_not():
            raise UpstreamError("the stream ended without [DONE]")

    def why_not(self) -> str:
        """Why nobody else can go on now; empty: somebody can."""
        if self.obstacle:
            return self.obstacle
        if self._prompt is None:
            return "the engine told no token ids"
        if self._asked.path == "chat" and not self._told:
            return "nothing of the answer's text was sent: it may begin with reasoning"
        return ""

    def resume(self, context_tokens: int) -> bytes | None:
        """The request for the rest, of whoever goes on; None: `obstacle` says why not."""
        self.obstacle = self.why_not()
        if self.obstacle or self._prompt is None:
            return None
        told = len(self._told)
        most = (self._asked.most or context_tokens - len(self._prompt)) - told
        if most <= 0:
            self.obstacle = "no room is left for more tokens"
            return None
        self._rest, self._ahead, self.fault = b"", array("I"), None
        self._before, self._resumed = told, True
        fields = {
            **self._asked.copied,
            "prompt": [*self._prompt, *self._told],
            "max_tokens": most,
            "min_tokens": max(0, self._asked.least - told),
            "stream": True,
            "return_token_ids": True,
        }
        return msgspec.json.encode(fields)

    def _retold(self, events: list[bytes]) -> Iterator[bytes]:
        for event in events:
            name, _, text = event.partition(b":")
            data = text.strip()
            if name != b"data" or data == _DONE:
                self.done = self.done or data == _DONE
                yield event + b"\n\n"
                continue
            told = self._event(data)
            if told is not None:
                yield b"data: " + told + b"\n\n"

    def _event(self, data: bytes) -> bytes | None:
        try:
            event = msgspec.json.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.obstacle = "an event is no JSON"
            return data
        if not isinstance(event, dict):
            return data
        if isinstance(event.get("error"), dict):
            self._died(event["error"])
            return data
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            if not self._listen(event, choices[0]):
                return None
            if self._resumed and self._asked.path == "chat":
                event["choices"] = [_as_chat(choices[0])]
        self._count(event)
        return msgspec.json.encode(self._named(event))

    def _died(self, error: dict[str, Any]) -> None:
        """An engine whose core is gone can still say so in its last event."""
        code = error.get("code")
        if isinstance(code, int) and code >= 500 and not self.why_not():
            raise UpstreamError(f"error {code} in mid-answer")
        self.obstacle = "the engine refused to go on"

    def _listen(self, event: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Take the token ids out; whether the event has anything else to say."""
        for place in (event, choice):
            prompt = place.get("prompt_token_ids")
            if prompt:
                place["prompt_token_ids"] = None
                self._prompt = self._prompt or _ids(prompt)
        ids, text = choice.get("token_ids"), _text(choice)
        if ids:
            self._ahead.extend(_ids(ids))
            choice["token_ids"] = None
        if text:
            if not self._ahead:
                self.obstacle = "the engine told no token ids"
            self._told.extend(self._ahead)
            self._ahead = array("I")
        if _says_more(choice):
            self.obstacle = "the answer has reasoning or calls of tools"
        if choice.get("finish_reason") is not None:
            self.obstacle = "the answer was over"
        # Without token ids the engine would not have sent a delta that says nothing.
        return not (ids and choice.get("delta") == {} and choice.get("finish_reason") is None)

    def _count(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if not self._before or not isinstance(usage, dict):
            return
        for name, more in (("prompt_tokens", -self._before), ("completion_tokens", self._before)):
            if isinstance(usage.get(name), int):
                usage[name] += more

    def _named(self, event: dict[str, Any]) -> dict[str, Any]:
        if not self._head:
            self._head = {name: event[name] for name in _HEAD if name in event}
        return {**event, **self._head} if self._resumed else event


def whole_text(answer: bytes) -> None:
    """Raise UpstreamError unless an answer of /detokenize says that its text ends with a whole character."""
    try:
        text = msgspec.json.decode(answer, type=_Detokenized).prompt
    except (msgspec.MsgspecError, ValueError) as error:
        raise UpstreamError("whoever should go on tells no text of tokens") from error
    if text.endswith("\ufffd"):
        raise UpstreamError("the text so far ends within a character")


def _ids(given: Any) -> array[int]:
    try:
        return array("I", given)
    except (TypeError, ValueError, OverflowError) as error:
        raise UpstreamError(f"token ids that are none: {error}") from error


def _text(choice: dict[str, Any]) -> object:
    delta = choice.get("delta")
    return delta.get("content") if isinstance(delta, dict) else choice.get("text")


def _says_more(choice: dict[str, Any]) -> bool:
    """Whether a delta holds what raw text of the rest could not go on with."""
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(
        value for name, value in delta.items() if name not in ("role", "content")
    )


def _as_chat(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of /v1/completions as one of a chat's stream."""
    finish = choice.get("finish_reason")
    found = {
        "index": 0,
        "delta": {"content": choice.get("text", "")},
        "logprobs": None,
        "finish_reason": finish,
        "token_ids": None,
    }
    if finish is not None:
        found["stop_reason"] = choice.get("stop_reason")
    return found
