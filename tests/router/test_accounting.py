"""Prompts that no router can make sense of, adapters, and full KV space: what is predicted and counted."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from kvist_connector.keys import chunk_keys, root_key
from kvist_connector.protocol.engine import EngineLoad, RequestRecord
from kvist_connector.protocol.feed import FEED_VERSION, Opening
from kvist_connector.protocol.tiers import Tier
from kvist_connector.settings import validate
from kvist_router.mind.interface import Decision, Metadata, Report
from kvist_router.mind.models import ServedModel
from kvist_router.mind.replica import Replica
from kvist_router.settings import IndexSettings, ReplicaSettings
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.feed import FakeAgent

COMPLETIONS = Metadata("completions")
TOKENS = list(range(1000, 1600))


def body(prompt: Any, model: str = "m") -> bytes:
    return json.dumps({"model": model, "prompt": prompt}).encode()


NONSENSE = [
    [-1],
    [1, -1],
    [2**32],
    [2**70],
    [1.5],
    [None],
    [[1, 2], [-3]],
    [[1, 2], 3],
    [1, [2]],
    [{"a": 1}],
    [[]],
    [],
]


@pytest.mark.parametrize("prompt", NONSENSE, ids=str)
async def test_token_ids_that_are_none_go_to_the_engine_as_they_are(router, prompt) -> None:
    async with FakeEngine() as engine:
        running = await router(replicas=[{"name": "a", "url": engine.url}])
        replica = running.mind.replicas["a"]
        decision = await running.mind.decide(body(prompt), COMPLETIONS)
        assert isinstance(decision, Decision)
        assert decision.body is None  # the engine sees what the client sent, and says what is wrong
        assert decision.predicted_tokens == 0
        assert (replica.outstanding_requests, len(running.mind.in_flight)) == (1, 1)
        await running.mind.report(decision.id, Report("ended", "status 400"))
        assert (replica.outstanding_tokens, replica.outstanding_requests) == (0, 0)
        assert len(running.mind.in_flight) == 0


async def test_the_engines_refusal_of_token_ids_reaches_the_client(router, http) -> None:
    async with FakeEngine() as engine:

        async def refuse(_: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "token id -1"}}, status=400)

        engine.answer = refuse
        running = await router(replicas=[{"name": "a", "url": engine.url}])
        async with http.post(running.url + "/v1/completions", data=body([-1])) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"] == "token id -1"
        assert engine.received[0].body == body([-1])


async def test_a_request_of_an_adapter_never_discredits_local_tokens(router, until) -> None:
    opening = Opening(
        version=FEED_VERSION, epoch=1, replica="r", fingerprint=b"f" * 32, group=0, model="m",
        chunk_tokens=256, block_tokens=32, gpu_known=False, draining=False,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine())
        agent = await stack.enter_async_context(FakeAgent(opening))
        replicas = [{"name": "a", "url": engine.url, "agent": agent.url}]
        running = await router(replicas=replicas, health={"interval_seconds": 3600})
        running.mind.replicas["a"].models = {
            "m": ServedModel("m", None, False),
            "adapter": ServedModel("adapter", None, True),
        }
        decision = await running.mind.decide(body(TOKENS, "adapter"), COMPLETIONS)
        # The connector's keys hold the adapter's revision.
        root = root_key(b"f" * 32, lora="adapter", lora_revision="digest")
        agent.record(
            RequestRecord(
                request=decision.id, prompt_tokens=len(TOKENS), last_chunk_key=chunk_keys(root, TOKENS)[-1],
                hit_tokens={}, arrived=0.0, lookup_seconds=0.0, wait_seconds=0.0, load_seconds=0.0,
                prefill_seconds=0.1,
            )
        )  # fmt: skip
        record = running.mind.records.get(decision.id)
        assert record is not None
        record.tokens_from = "local"
        await until(lambda: record.actual is not None)
        assert running.mind.metrics.mismatches._value.get() == 0


# ---- KV space


def loaded(used: int, held: float, waiting: int = 0) -> Replica:
    replica = Replica(validate(ReplicaSettings, {"url": "http://h:1"}), IndexSettings())
    replica.load = EngineLoad(kv_tokens_total=10_000, kv_tokens_used=used, waiting_prefill_tokens=waiting)
    replica._load_at = 0.0
    if held:
        replica.held(held)
    return replica


def test_a_prompt_that_fits_does_not_wait_for_space() -> None:
    assert loaded(used=5_000, held=10.0).busy(0.0).space_seconds(5_000) == 0


def test_a_prompt_that_does_not_fit_waits_for_its_share_of_those_that_run() -> None:
    # 9,000 tokens that each stay ten seconds make way at 900 a second; 1,000 of 4,000 are free.
    assert loaded(used=9_000, held=10.0).busy(0.0).space_seconds(4_000) == pytest.approx(3_000 / 900)


def test_prompts_that_wait_there_already_come_first() -> None:
    busy = loaded(used=9_000, held=10.0, waiting=1_000).busy(0.0)
    assert busy.space_seconds(4_000) == pytest.approx(4_000 / 900)


def test_of_what_the_engine_reports_only_what_others_sent_is_added_to_our_own() -> None:
    replica = loaded(used=5_000, held=10.0)
    replica.load = EngineLoad(
        waiting_requests=3, running_requests=5, decode_sequences=4, waiting_prefill_tokens=3_000,
        running_prefill_tokens=1_000,
    )  # fmt: skip
    assert replica.busy(0.0).prefill_tokens == 4_000  # none of them is ours
    replica.outstanding_prefills, replica.outstanding_tokens = 3, 600
    assert replica.busy(0.0).prefill_tokens == pytest.approx(600 + 4_000 / 4)
    replica.outstanding_prefills = 6
    assert replica.busy(0.0).prefill_tokens == 600
    assert replica.busy(3_600.0).prefill_tokens == 600  # the load report is old


def test_who_waits_and_who_is_answered_is_ours_or_the_engines_report() -> None:
    replica = loaded(used=5_000, held=10.0)
    replica.outstanding_prefills, replica.outstanding_requests = 2, 3
    old = replica.busy(3_600.0)
    assert (old.waiting, old.decoding) == (2, 1)
    replica.load = EngineLoad(waiting_requests=3, running_requests=5, decode_sequences=4)
    new = replica.busy(0.0)
    assert (new.waiting, new.decoding) == (4, 4)


def test_more_than_the_space_has_to_be_given_back_several_times() -> None:
    assert loaded(used=9_000, held=10.0, waiting=30_000).busy(0.0).space_seconds(4_000) == pytest.approx(
        33_000 / 900
    )


def test_without_figures_space_costs_nothing() -> None:
    assert loaded(used=9_000, held=0.0).busy(0.0).space_seconds(4_000) == 0
    assert loaded(used=9_000, held=10.0).busy(3_600.0).space_seconds(4_000) == 0  # the load report is old


async def test_a_full_engine_is_passed_over_for_one_with_room(router, until) -> None:
    opening = Opening(
        version=FEED_VERSION, epoch=1, replica="r", fingerprint=b"f" * 32, group=0, model="m",
        chunk_tokens=256, block_tokens=32, gpu_known=False, draining=False,
    )  # fmt: skip
    keys = chunk_keys(root_key(b"f" * 32), TOKENS)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(2)]
        agents = [
            await stack.enter_async_context(FakeAgent(opening, {Tier.MEMORY: held}))
            for held in (keys[:1], [])
        ]
        running = await router(
            replicas=[
                {"name": f"r{number}", "url": engine.url, "agent": agent.url}
                for number, (engine, agent) in enumerate(zip(engines, agents, strict=True))
            ]
        )

        async def choose() -> Decision:
            decision = await running.mind.decide(body(TOKENS), COMPLETIONS)
            assert isinstance(decision, Decision)
            await running.mind.report(decision.id, Report("cancelled"))
            return decision

        full = running.mind.replicas["r0"]
        assert (await choose()).replica == "r0"
        full.held(20.0)
        agents[0].load(EngineLoad(kv_tokens_total=4_000, kv_tokens_used=3_900, decode_sequences=4))
        await until(lambda: full.load.kv_tokens_used == 3_900)
        decision = await choose()
        assert decision.replica == "r1"
        record = running.mind.records.get(decision.id)
        assert record is not None
        assert {item.replica: item.space > 1 for item in record.considered} == {"r0": True, "r1": False}
