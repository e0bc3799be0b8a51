"""A streamed answer whose engine dies goes on at another replica, exactly or not at all."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvist_router.errors import UpstreamError
from kvist_router.relay.continuation import continuable
from kvist_router.relay.story import Story
from kvist_router.testing.engine import FakeEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 512
# One token a byte, as a byte-level vocabulary has it: the last character takes two tokens.
SONG = "Ein Zweig, ein Blatt, ein Ast, ein grüner".encode()


class Singer:
    """An engine whose every prompt is answered with the song, from where the prompt has got to.

    `dies_after`: events until the connection breaks; `says_so`: it ends with an error event instead.
    """

    def __init__(self, engine: FakeEngine, name: str) -> None:
        self.engine, self.name = engine, name
        self.dies_after: int | None = None
        self.says_so = False
        self.burst = 1  # tokens an event
        self.reasons = False
        engine.answer = self.answer

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        if request.path == "/detokenize":
            return web.json_response({"prompt": bytes(asked["tokens"]).decode("utf-8", "replace")})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(self.events(request.path, asked)):
            if number == self.dies_after:
                if self.says_so:
                    await response.write(b'data: {"error":{"message":"gone","code":500}}\n\ndata: [DONE]\n\n')
                    return response
                await response.write(b'data: {"id": "half an ev')
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def events(self, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
        chat = path == CHAT
        prompt = _prompt(asked)
        sung = len(prompt) - len(_prompt_of_song(prompt))
        tokens = SONG[sung:][: asked.get("max_tokens", CONTEXT)]
        found, text = [], b""
        if chat:
            found.append(self._event(chat, {"role": "assistant", "content": ""}, None, None, prompt))
        for at in range(0, len(tokens), self.burst):
            ids = tokens[at : at + self.burst]
            text += ids
            whole = text.decode("utf-8", "ignore")
            text = text[len(whole.encode()) :]
            last = at + self.burst >= len(tokens)
            delta = {"reasoning" if self.reasons else "content": whole}
            shown = None if chat or at else prompt
            found.append(self._event(chat, delta, list(ids), "stop" if last else None, shown))
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
            usage["total_tokens"] = sum(usage.values())
            found.append(self._head(chat) | {"choices": [], "usage": usage})
        if not asked.get("return_token_ids"):
            for event in found:
                _without_ids(event)
        return found

    def _head(self, chat: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {"id": f"of-{self.name}", "object": kind, "created": 1, "model": "m"}

    def _event(
        self, chat: bool, delta: dict[str, Any], ids: Any, finish: str | None, prompt: bytes | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "token_ids": ids}
        choice |= {"delta": delta} if chat else {"text": delta.get("content", "")}
        if finish is not None:
            choice["stop_reason"] = None
        event = self._head(chat) | {"choices": [choice]}
        if not chat or prompt is not None:
            (event if chat else choice)["prompt_token_ids"] = None if prompt is None else list(prompt)
        return event


def _prompt(asked: dict[str, Any]) -> bytes:
    if "messages" in asked:
        return b"<" + asked["messages"][-1]["content"].encode() + b">"
    given = asked["prompt"]
    return given.encode() if isinstance(given, str) else bytes(given)


def _prompt_of_song(prompt: bytes) -> bytes:
    """A prompt without the part of the song that it ends with."""
    longest = next(n for n in range(len(SONG), -1, -1) if prompt.endswith(SONG[:n]))
    return prompt[: len(prompt) - longest]


def _without_ids(event: dict[str, Any]) -> None:
    for place in (event, *event["choices"]):
        for name in ("prompt_token_ids", "token_ids"):
            if name in place:
                place[name] = None


@asynccontextmanager
async def two_singers(router: Any, **values: Any) -> AsyncIterator[tuple[Any, Singer, Singer]]:
    """A router that sends first requests to the one that dies after some events."""
    async with FakeEngine(longest=CONTEXT) as one, FakeEngine(longest=CONTEXT) as two:
        limits = {"continuations": 1, **values}
        replicas = [{"name": f"r{n}", "url": engine.url} for n, engine in enumerate((one, two))]
        running = await router(replicas=replicas, limits=limits, policy="round-robin")
        yield running, Singer(one, "r0"), Singer(two, "r1")


def request(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "Sing!"}]} if path == CHAT else {"prompt": "Sing: "}
    return {"model": "m", "stream": True, "max_tokens": 100, **prompt, **fields}


async def events_of(http: Any, running: Any, path: str, **fields: Any) -> list[Any]:
    """What a client sees; raises aiohttp.ClientPayloadError for an answer without its end."""
    async with http.post(running.url + path, json=request(path, **fields)) as answer:
        assert answer.status == 200
        data = await answer.read()
    assert data.endswith(b"\n\n")
    lines = [event.removeprefix(b"data: ") for event in data.split(b"\n\n")[:-1]]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def text_of(events: list[Any]) -> str:
    choices = [event["choices"][0] for event in events if event != b"[DONE]" and event.get("choices")]
    return "".join(item.get("text") or item.get("delta", {}).get("content") or "" for item in choices)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("says_so", [False, True])
async def test_the_client_sees_the_answer_as_if_nothing_had_happened(router, http, path, says_so) -> None:
    usage = {"include_usage": True}
    async with two_singers(router) as (running, one, two):
        unbroken = await events_of(http, running, path, stream_options=usage)  # of r0
        assert text_of(unbroken) == SONG.decode()
        await events_of(http, running, path)  # of r1: the next is r0's again
        one.dies_after, one.says_so = 12, says_so
        broken = await events_of(http, running, path, stream_options=usage)
        assert broken == unbroken
        rest = json.loads(two.engine.received[-1].body)
        assert two.engine.received[-1].path == COMPLETIONS
        assert SONG[:11] in bytes(rest["prompt"])
        assert rest["max_tokens"] < 100


async def test_half_a_character_is_made_anew(router, http) -> None:
    async with two_singers(router) as (running, one, two):
        one.dies_after = SONG.index("ü".encode()) + 1  # between the two tokens of the character
        assert text_of(await events_of(http, running, COMPLETIONS)) == SONG.decode()
        rest = json.loads(two.engine.received[-1].body)
        assert bytes(rest["prompt"]).decode().endswith("ein gr")


async def test_text_that_may_end_within_a_character_does_not_go_on(router, http) -> None:
    async with two_singers(router) as (running, one, _):
        one.burst = SONG.index("ü".encode()) + 1  # the half character comes with text before it
        one.dies_after = 1
        events = await stream_until_it_breaks(http, running, COMPLETIONS)
        assert events[-1]["error"]["code"] == "upstream_failed"


async def stream_until_it_breaks(http: Any, running: Any, path: str, **fields: Any) -> list[Any]:
    """The events of an answer that has no end."""
    found = []
    async with http.post(running.url + path, json=request(path, **fields)) as answer:
        try:
            async for line in answer.content:
                if line.startswith(b"data: ") and b"half an ev" not in line:
                    found.append(json.loads(line.removeprefix(b"data: ")))
        except aiohttp.ClientPayloadError:
            return found
    raise AssertionError("the answer has its end")


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"stop": ["x"]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"presence_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"vllm_xargs": {"a": 1}},
        {"return_token_ids": True},
    ],
)
async def test_what_could_not_go_on_exactly_ends_with_an_error_as_before(router, http, fields) -> None:
    async with two_singers(router) as (running, one, two):
        one.dies_after = 5
        events = await stream_until_it_breaks(http, running, CHAT, **fields)
        assert events[-1]["error"]["code"] == "upstream_failed"
        assert json.loads(one.engine.received[0].body).get("return_token_ids") == fields.get(
            "return_token_ids"
        )
        assert not two.engine.received


async def test_off_by_default_and_bodies_are_then_untouched(router, http) -> None:
    async with two_singers(router, continuations=0) as (running, one, two):
        one.dies_after = 5
        events = await stream_until_it_breaks(http, running, COMPLETIONS)
        assert events[-1]["error"]["code"] == "upstream_failed"
        assert json.loads(one.engine.received[0].body) == request(COMPLETIONS)
        assert not two.engine.received


async def test_a_continuation_is_paid_for_as_a_retry_and_counted(router, http) -> None:
    async with two_singers(router, retry_ratio=0) as (running, one, two):
        one.dies_after = 5
        events = await stream_until_it_breaks(http, running, COMPLETIONS)
        assert events[-1]["error"]["code"] == "upstream_failed"
        assert not two.engine.received
        assert 'continuations_total{outcome="refused"} 1.0' in await metrics(http, running)
    async with two_singers(router) as (running, one, two):
        one.dies_after = 5
        assert text_of(await events_of(http, running, COMPLETIONS)) == SONG.decode()
        assert 'continuations_total{outcome="continued"} 1.0' in await metrics(http, running)


async def metrics(http: Any, running: Any) -> str:
    async with http.get(running.admin_url + "/metrics") as answer:
        text: str = await answer.text()
        return text


async def test_an_answer_that_reasons_does_not_go_on(router, http) -> None:
    async with two_singers(router) as (running, one, two):
        one.reasons, one.dies_after = True, 8
        events = await stream_until_it_breaks(http, running, CHAT)
        assert events[-1]["error"]["code"] == "upstream_failed"
        assert not two.engine.received


async def test_both_replicas_die_and_nothing_is_left_in_flight(router, http, until) -> None:
    async with two_singers(router) as (running, one, two):
        one.dies_after, two.dies_after = 6, 6
        events = await stream_until_it_breaks(http, running, COMPLETIONS)
        assert events[-1]["error"]["code"] == "upstream_failed"
        assert text_of(events[:-1]) == SONG[:12].decode()
        await until(lambda: len(running.mind.in_flight) == 0)


async def test_a_limit_by_the_context_counts_what_was_told(router, http) -> None:
    async with two_singers(router) as (running, one, two):
        one.dies_after = 5
        body = request(CHAT)
        del body["max_tokens"]
        async with http.post(running.url + CHAT, json=body) as answer:
            assert b"[DONE]" in await answer.read()
        rest = json.loads(two.engine.received[-1].body)
        assert rest["max_tokens"] == CONTEXT - len(rest["prompt"])


@given(cuts=st.lists(st.integers(min_value=0, max_value=4000), max_size=6), dies=st.integers(1, 40))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int], dies: int) -> None:
    body = json.dumps(request(COMPLETIONS)).encode()
    asked = continuable(body, "completions")
    assert asked is not None
    singer = Singer(FakeEngine(), "a")
    events = singer.events(COMPLETIONS, json.loads(asked.body))[:dies]
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: {"
    whole, parts = Story(asked), Story(asked)
    told = whole.feed(data)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    again = b"".join(parts.feed(data[start:end]) for start, end in pairwise(edges) if start < end)
    assert told == again
    assert whole.resume(CONTEXT) == parts.resume(CONTEXT)
    if dies < len(SONG):
        rest = json.loads(whole.resume(CONTEXT) or b"{}")
        assert bytes(rest["prompt"]).startswith(b"Sing: Ein"[: 6 + min(dies, 3)])


def test_token_ids_that_are_none_are_a_fault_of_the_engine() -> None:
    asked = continuable(json.dumps(request(COMPLETIONS)).encode(), "completions")
    assert asked is not None
    story = Story(asked)
    assert (
        story.feed(b': ping\n\ndata: {"choices": [{"text": "x", "token_ids": [-1, "y"]}]}\n\n')
        == b": ping\n\n"
    )
    assert isinstance(story.fault, UpstreamError)
    assert "token ids" in str(story.fault)
