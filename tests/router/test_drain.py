"""A draining replica: nothing new goes there while there is another, and its agent is told so."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvist_connector.protocol.feed import FEED_VERSION, Opening
from kvist_router.app import Running
from kvist_router.mind.interface import Decision, Metadata, Refusal, Report
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.feed import FakeAgent

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
BODY = json.dumps(CHAT).encode()
SECONDS = 60


def opening(draining: bool = False, epoch: int = 1) -> Opening:
    return Opening(
        version=FEED_VERSION, epoch=epoch, replica="r", fingerprint=b"f" * 32, group=0, model="m",
        chunk_tokens=256, block_tokens=32, gpu_known=False, draining=draining,
    )  # fmt: skip


class Pool:
    """Engines with agents behind one router."""

    def __init__(self, running: Running, agents: list[FakeAgent], engines: list[FakeEngine]) -> None:
        self.running, self.mind = running, running.mind
        self.agents, self.engines = agents, engines

    async def decide(self) -> Decision:
        decision = await self.mind.decide(BODY, Metadata("chat"))
        assert isinstance(decision, Decision), decision
        return decision

    async def end(self, decision: Decision) -> None:
        await self.mind.report(decision.id, Report("ended"))


@pytest.fixture
async def pool(router):
    async with AsyncExitStack() as stack:

        async def start(count: int, **values: Any) -> Pool:
            agents = [await stack.enter_async_context(FakeAgent(opening())) for _ in range(count)]
            engines = [await stack.enter_async_context(FakeEngine()) for _ in range(count)]
            listed = [
                {"name": f"r{number}", "url": engine.url, "agent": agent.url}
                for number, (engine, agent) in enumerate(zip(engines, agents, strict=True))
            ]
            return Pool(await router(replicas=listed, name="router-7", **values), agents, engines)

        yield start


async def test_the_feed_names_the_router_and_that_it_acknowledges(pool) -> None:
    started = await pool(1)
    assert started.agents[0].queries == [{"reader": "router-7", "acknowledges": "1"}]


async def test_an_idle_router_acknowledges_at_once_and_sends_nothing_more(pool, until) -> None:
    started = await pool(2)
    started.agents[0].state(gpu_known=False, draining=True)
    await until(lambda: started.agents[0].acknowledged)
    assert started.agents[0].acknowledged == [{"reader": "router-7", "in_flight": 0}]
    for _ in range(4):
        assert (await started.decide()).replica == "r1"


async def test_running_requests_are_counted_and_the_last_end_is_told(pool, until) -> None:
    started = await pool(1)
    first, second = await started.decide(), await started.decide()
    agent = started.agents[0]
    agent.state(gpu_known=False, draining=True)
    await until(lambda: len(agent.acknowledged) == 1)
    assert agent.acknowledged[0]["in_flight"] == 2
    await started.end(first)
    await started.end(second)
    await until(lambda: len(agent.acknowledged) == 2)
    assert agent.acknowledged[1]["in_flight"] == 0


async def test_an_acknowledgement_that_does_not_arrive_is_sent_again(pool, until) -> None:
    started = await pool(2)
    started.agents[0].deaf = 2
    started.agents[0].state(gpu_known=False, draining=True)
    await until(lambda: started.agents[0].acknowledged)


async def test_a_drain_that_began_before_the_router_is_acknowledged_too(pool, until) -> None:
    started = await pool(2)
    started.agents[0].opening = opening(draining=True, epoch=2)
    started.agents[0].end()
    await until(lambda: started.agents[0].acknowledged)
    assert (await started.decide()).replica == "r1"


async def test_undone_it_takes_requests_again(pool, until) -> None:
    started = await pool(2)
    started.agents[0].state(gpu_known=False, draining=True)
    await until(lambda: started.agents[0].acknowledged)
    started.agents[0].state(gpu_known=False, draining=False)
    await until(lambda: not started.mind.replicas["r0"].draining)
    await started.end(await started.decide())
    busy = [await started.decide() for _ in range(2)]
    assert {decision.replica for decision in busy} == {"r0", "r1"}


async def test_the_only_replica_goes_on_taking_requests(pool, until) -> None:
    started = await pool(1)
    started.agents[0].state(gpu_known=False, draining=True)
    await until(lambda: started.agents[0].acknowledged)
    assert (await started.decide()).replica == "r0"


async def test_streams_of_a_draining_replica_go_on(pool, until, http) -> None:
    started = await pool(1)
    engine, agent = started.engines[0], started.agents[0]
    engine.rest.clear()
    async with http.post(started.running.url + "/v1/chat/completions", json=CHAT) as answer:
        assert await answer.content.readany() == engine.pieces[0]
        agent.state(gpu_known=False, draining=True)
        await until(lambda: agent.acknowledged)
        assert agent.acknowledged[0]["in_flight"] == 1
        engine.rest.set()
        assert await answer.content.read() == b"".join(engine.pieces[1:])
    await until(lambda: agent.acknowledged[-1]["in_flight"] == 0)


async def test_a_drain_outlives_the_feed_for_a_while_only(pool, until) -> None:
    started = await pool(2, index={"stale_seconds": 5.0})
    replica = started.mind.replicas["r0"]
    started.agents[0].state(gpu_known=False, draining=True)
    await until(lambda: started.agents[0].acknowledged)
    await started.agents[0].stop()
    await until(lambda: not replica.feed_live)
    assert replica.draining
    replica.tick(float("inf"))
    assert not replica.draining


async def test_a_request_whose_tokens_are_still_being_made_does_not_go_to_a_replica_that_began_to_drain(
    pool, until
) -> None:
    started = await pool(2)
    for engine in started.engines:
        engine.tokenizing.clear()
    waiting = asyncio.create_task(started.decide())
    await until(lambda: any(engine.tokenized for engine in started.engines))
    started.agents[0].state(gpu_known=False, draining=True)
    await until(lambda: started.agents[0].acknowledged)
    for engine in started.engines:
        engine.tokenizing.set()
    assert (await waiting).replica == "r1"


# ---- waiting for a replica


async def test_without_a_queue_a_request_that_nobody_can_take_is_refused(pool, until) -> None:
    started = await pool(1)
    started.mind.replicas["r0"].listed(ready=False, terminating=False)
    refusal = await started.mind.decide(BODY, Metadata("chat"))
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (503, "no_replica")


async def test_with_a_queue_a_request_waits_for_the_only_replica_to_come_back(pool, until) -> None:
    started = await pool(1, limits={"queue_seconds": SECONDS})
    replica = started.mind.replicas["r0"]
    started.agents[0].state(gpu_known=False, draining=True)
    await until(lambda: replica.draining)
    waiting = asyncio.create_task(started.decide())
    metric = started.mind.metrics.waiting
    await until(lambda: metric._value.get() == 1)
    started.agents[0].state(gpu_known=False, draining=False)
    assert (await asyncio.wait_for(waiting, SECONDS)).replica == "r0"
    assert metric._value.get() == 0


async def test_when_the_time_of_the_queue_is_over_a_draining_replica_is_better_than_none(pool, until) -> None:
    started = await pool(1, limits={"queue_seconds": 0.05})
    started.agents[0].state(gpu_known=False, draining=True)
    await until(lambda: started.mind.replicas["r0"].draining)
    assert (await started.decide()).replica == "r0"


async def test_a_request_that_waits_too_long_is_refused(pool) -> None:
    started = await pool(1, limits={"queue_seconds": 0.05})
    started.mind.replicas["r0"].listed(ready=False, terminating=False)
    refusal = await started.mind.decide(BODY, Metadata("chat"))
    assert isinstance(refusal, Refusal)
    assert refusal.status == 503


async def test_a_retry_does_not_wait_for_a_replica_that_would_fail_it_again(pool) -> None:
    started = await pool(1, limits={"queue_seconds": SECONDS})
    retry = Metadata("chat", id="q", exclude=("r0",))
    assert isinstance(await started.mind.decide(BODY, retry), Refusal)


@pytest.mark.parametrize(("queue", "status"), [(0.0, 503), (3600.0, 200)])
async def test_a_router_that_queues_stays_ready_without_replicas(pool, http, until, queue, status) -> None:
    started = await pool(1, limits={"queue_seconds": queue}, index={"ready_seconds": 0})
    async with http.get(started.running.url + "/readyz") as answer:
        assert answer.status == 200
    await started.engines[0].stop()
    await until(lambda: not started.mind.replicas["r0"].healthy)
    async with http.get(started.running.url + "/readyz") as answer:
        assert answer.status == status


async def test_a_draining_pool_is_still_ready(pool, http, until) -> None:
    started = await pool(1, index={"ready_seconds": 0})
    started.agents[0].state(gpu_known=False, draining=True)
    await until(lambda: started.mind.replicas["r0"].draining)
    async with http.get(started.running.url + "/readyz") as answer:
        assert answer.status == 200


async def test_waiting_requests_are_bounded(pool, until) -> None:
    started = await pool(1, limits={"queue_seconds": SECONDS, "in_flight": 2})
    started.mind.replicas["r0"].listed(ready=False, terminating=False)
    waiting = [asyncio.create_task(started.decide()) for _ in range(2)]
    await until(lambda: started.mind.metrics.waiting._value.get() == 2)
    refusal = await started.mind.decide(BODY, Metadata("chat"))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "overloaded"
    started.mind.replicas["r0"].listed(ready=True, terminating=False)
    assert {decision.replica for decision in await asyncio.gather(*waiting)} == {"r0"}


# ---- the agents' token


async def test_the_token_of_agents_may_change(router, until, tmp_path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    async with FakeEngine() as engine, FakeAgent(opening()) as agent:
        agent.token = "old"
        running = await router(
            replicas=[{"name": "r0", "url": engine.url, "agent": agent.url}],
            agent={"token_file": str(file)},
        )
        replica = running.mind.replicas["r0"]
        agent.token = "new"
        agent.end()
        await until(lambda: "401" in replica.feed_problem)
        assert "agent.token_file" in replica.feed_problem
        file.write_text("new\n")
        await until(lambda: replica.feed_live and replica.mirror.complete)
        agent.state(gpu_known=False, draining=True)
        await until(lambda: agent.acknowledged)


async def test_a_token_file_that_cannot_be_read_is_said(router, until, tmp_path) -> None:
    async with FakeEngine() as engine, FakeAgent(opening()) as agent:
        running = await router(
            ready=False,
            replicas=[{"name": "r0", "url": engine.url, "agent": agent.url}],
            agent={"token_file": str(tmp_path / "none")},
        )
        await until(lambda: bool(running.mind.replicas))
        await until(lambda: "agent.token_file" in running.mind.replicas["r0"].feed_problem)
