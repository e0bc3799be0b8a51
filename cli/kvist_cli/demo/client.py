"""A streaming chat client that measures: TTFT, gaps between tokens, usage, what the router says.

Called by the replay, from its threads. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvist_cli.demo.errors import DemoError
from kvist_connector import names

CONNECT_SECONDS = 10.0
READ_SECONDS = 300.0


@dataclass(frozen=True)
class Reply:
    """One answer. `predicted_tokens` is None where the router made no prediction."""

    text: str
    request_id: str
    replica: str
    predicted_tokens: int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft: float
    gaps: tuple[float, ...]
    seconds: float


@dataclass
class _Stream:
    """What has arrived of an answer."""

    started: float
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise DemoError(
                f"the engine broke off an answer: {event['error'].get('message', event['error'])}"
            )
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            if piece := choice.get("delta", {}).get("content"):
                self.pieces.append(piece)
                self.times.append(time.monotonic())


def connect() -> httpx.Client:
    """A client with a deadline for every phase."""
    return httpx.Client(timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS))


def chat(
    client: httpx.Client, base: str, model: str, messages: Sequence[dict[str, str]], max_tokens: int
) -> Reply:
    """Send a chat request and read its stream; raises DemoError in words."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream = _Stream(time.monotonic())
    try:
        with client.stream("POST", f"{base}/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise DemoError(f"{base} answered {response.status_code}: {response.read()[:500].decode()}")
            for event in _events(response):
                stream.take(event)
    except httpx.HTTPError as error:
        raise DemoError(f"request to {base} failed: {error!r}") from error
    return _reply(stream, response.headers, time.monotonic())


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _reply(stream: _Stream, headers: httpx.Headers, ended: float) -> Reply:
    if not stream.times:
        raise DemoError("the model answered with nothing: no token arrived")
    predicted = headers.get(names.HEADER_PREDICTED_TOKENS)
    times = stream.times
    return Reply(
        text="".join(stream.pieces),
        request_id=headers.get(names.HEADER_REQUEST_ID, ""),
        replica=headers.get(names.HEADER_REPLICA, ""),
        predicted_tokens=int(predicted) if predicted else None,
        prompt_tokens=stream.usage.get("prompt_tokens", 0),
        completion_tokens=stream.usage.get("completion_tokens", 0),
        cached_tokens=(stream.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        ttft=times[0] - stream.started,
        gaps=tuple(b - a for a, b in itertools.pairwise(times)),
        seconds=ended - stream.started,
    )
