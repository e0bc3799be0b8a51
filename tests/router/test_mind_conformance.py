"""The mind's interface behaves the same in this process and over a Unix socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvist_router.mind.fallback import GONE
from kvist_router.mind.interface import Decision, Metadata, Refusal, Report, View
from kvist_router.mind.mind import LocalMind
from kvist_router.mind.socket import MindClient, MindServer
from kvist_router.testing.engine import FakeEngine
from kvist_router.tokens.estimate import estimated_tokens

CHAT = Metadata("chat")
VIEW = View("", {"m": None}, (), ())


def body(text: str = "x", **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


class Minds:
    """A mind over two engines, and the interface under test."""

    def __init__(
        self, local: LocalMind, mind: Any, server: MindServer | None, following: asyncio.Task[str] | None
    ) -> None:
        self.local, self.mind, self.server, self.following = local, mind, server, following


async def serve(path: Path, mind: LocalMind) -> MindServer:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    server = MindServer(mind, lambda: VIEW)
    await server.start(listener)
    return server


async def ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(params=["in-process", "socket"])
async def minds(request, router, tmp_path) -> AsyncIterator[Minds]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(2)]
        running = await router(
            replicas=[{"name": f"r{number}", "url": engine.url} for number, engine in enumerate(engines)]
        )
        if request.param == "in-process":
            yield Minds(running.mind, running.mind, None, None)
            return
        path = tmp_path / "mind.sock"
        server = await serve(path, running.mind)
        stack.push_async_callback(server.close)
        told = asyncio.Event()
        client = MindClient(path, lambda view: told.set())
        following = asyncio.create_task(client.follow())
        stack.push_async_callback(ended, following)
        await asyncio.wait_for(told.wait(), 60)
        yield Minds(running.mind, client, server, following)


async def test_a_decision_names_a_replica_and_counts_as_in_flight(minds: Minds) -> None:
    decision = await minds.mind.decide(body(stream=True), CHAT)
    assert isinstance(decision, Decision)
    assert decision.url == minds.local.replicas[decision.replica].url
    assert decision.stream
    assert decision.body is None
    assert len(minds.local.in_flight) == 1


@pytest.mark.parametrize("last", ["ended", "cancelled", "failed"])
async def test_every_end_empties_the_in_flight_map(minds: Minds, until, last) -> None:
    decision = await minds.mind.decide(body(), CHAT)
    for event in ("first_byte", last):
        await minds.mind.report(decision.id, Report(event))
    await until(lambda: len(minds.local.in_flight) == 0)
    replica = minds.local.replicas[decision.replica]
    assert (replica.outstanding_tokens, replica.outstanding_requests) == (0, 0)
    record = minds.local.records.get(decision.id)
    assert record is not None
    assert record.outcome == last


async def test_bad_bodies_are_answered_by_a_refusal(minds: Minds) -> None:
    refusal = await minds.mind.decide(b"{", CHAT)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (400, "invalid_json")


async def test_a_retry_keeps_the_id_and_avoids_the_replica(minds: Minds) -> None:
    first = await minds.mind.decide(body(), CHAT)
    await minds.mind.report(first.id, Report("failed", "reset"))
    second = await minds.mind.decide(body(), Metadata("chat", id=first.id, exclude=(first.replica,)))
    assert isinstance(second, Decision)
    assert second.id == first.id
    assert second.replica != first.replica


async def test_replacement_bodies_travel(minds: Minds) -> None:
    decision = await minds.mind.decide(body(kvist={"tags": ["a"]}), CHAT)
    assert isinstance(decision, Decision)
    assert decision.body is not None
    assert json.loads(decision.body)["kv_transfer_params"] == {"tags": ["a"]}


async def test_unknown_ids_are_ignored(minds: Minds) -> None:
    await minds.mind.report("nobody", Report("ended"))
    assert isinstance(await minds.mind.decide(body(), CHAT), Decision)


async def test_questions_at_once_get_their_own_answers(minds: Minds) -> None:
    bodies = [body(f"{number}" * (number + 1) * 8) for number in range(40)]
    decisions = await asyncio.gather(*(minds.mind.decide(item, CHAT) for item in bodies))
    lengths = [decision.prompt_tokens for decision in decisions]
    assert lengths == [estimated_tokens(json.loads(item)) for item in bodies]
    assert len(set(lengths)) > 30


async def test_a_question_given_up_leaves_nothing_in_flight(minds: Minds, until) -> None:
    asking = asyncio.create_task(minds.mind.decide(body(), CHAT))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    follow_up = await minds.mind.decide(body(), CHAT)  # the first answer, if any, came before this one
    await minds.mind.report(follow_up.id, Report("ended"))
    await until(lambda: len(minds.local.in_flight) == 0)


async def test_a_relay_that_vanishes_leaves_nothing_in_flight(minds: Minds, until) -> None:
    if not isinstance(minds.mind, MindClient):
        pytest.skip("a relay in the mind's process cannot vanish alone")
    await minds.mind.decide(body(), CHAT)
    await ended(minds.following)
    await until(lambda: len(minds.local.in_flight) == 0)


async def test_a_mind_that_goes_answers_what_is_open_by_a_503(minds: Minds) -> None:
    if minds.server is None or minds.following is None:
        pytest.skip("a mind in the relay's process cannot vanish alone")
    assert isinstance(await minds.mind.decide(body(), CHAT), Decision)
    await minds.server.close()
    assert await minds.following
    assert await minds.mind.decide(body(), CHAT) == GONE
