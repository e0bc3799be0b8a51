"""The phase that others' tests leave out: a decision that does not come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvist_router.mind.interface import Decision, Metadata
from kvist_router.testing.engine import FakeEngine

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decision_that_does_not_come_is_503_and_given_up(router, http, monkeypatch, stream) -> None:
    given_up = asyncio.Event()

    async def never(body: bytes, metadata: Metadata) -> Decision:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()
        raise AssertionError

    async with FakeEngine() as engine:
        running = await router(replicas=[{"url": engine.url}], limits={"decide_seconds": 0.2})
        with monkeypatch.context() as patch:
            patch.setattr(running.mind, "decide", never)
            async with http.post(running.url + CHAT, json={**BODY, "stream": stream}) as answer:
                found: dict[str, Any] = (await answer.json())["error"]
                assert (answer.status, found["code"]) == (503, "overloaded")
                assert int(answer.headers["retry-after"]) > 0
            await asyncio.wait_for(given_up.wait(), 60)
        assert engine.received == []
        async with http.post(running.url + CHAT, json=BODY) as answer:
            assert answer.status == 200
