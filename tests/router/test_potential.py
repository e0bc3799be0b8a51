"""In front of engines without connector the router says what one would add."""

from __future__ import annotations

import json
import logging
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_router.mind.interface import Metadata, Report
from kvist_router.mind.mirror import ApproximateIndex
from kvist_router.mind.potential import REPORT_SECONDS, NestedStores, Potential
from kvist_router.mind.replica import Replica
from kvist_router.settings import IndexSettings, ReplicaSettings
from kvist_router.testing.engine import FakeEngine

METRICS = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250.0
"""


async def send(running: Any, prompt: list[int]) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    decision = await running.mind.decide(body, Metadata("completions"))
    await running.mind.report(decision.id, Report("first_byte"))
    await running.mind.report(decision.id, Report("ended"))


async def test_what_another_engine_computed_is_what_a_connector_would_load(router, http) -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        running = await router(replicas=[{"url": first.url}, {"url": second.url}], policy="round-robin")
        for _ in range(2):  # each engine computes it once
            await send(running, [5] * 1025)
        async with http.get(running.admin_url + "/v1/kvist/potential") as answer:
            said = await answer.json()
        assert len(said["engines"]) == 2
        assert said["prompt_tokens"] == 2050
        assert said["today"] == {"hit_rate": 0.0, "from": "router"}
        assert [item["hit_rate"] for item in said["with_connector"]] == [pytest.approx(1024 / 2050)] * 3


async def test_what_engines_say_of_their_own_cache_counts_as_today(router, until) -> None:
    async with FakeEngine() as engine:
        engine.metrics = METRICS
        running = await router(replicas=[{"url": engine.url}])
        await until(lambda: running.mind.potential.summary()["today"]["from"] == "engines")
        assert running.mind.potential.summary()["today"]["hit_rate"] == 0.25


@pytest.mark.parametrize("page", ["", "not { metrics", 'vllm:prefix_cache_queries_total{engine="0" 1'])
async def test_an_engine_that_does_not_say_is_no_less_healthy(router, page: str) -> None:
    async with FakeEngine() as engine:
        engine.metrics = page
        running = await router(replicas=[{"url": engine.url}])
        assert running.mind.potential.summary()["today"]["from"] == "router"


def replica(name: str, agent: str | None = None) -> Replica:
    settings = ReplicaSettings(name=name, url="http://127.0.0.1:1", agent=agent)
    return Replica(settings, IndexSettings())


def test_engines_with_an_agent_do_not_count() -> None:
    managed = replica("a", "http://127.0.0.1:2")
    potential = Potential({"a": managed}, lambda: 0.0)
    potential.saw(managed, [b"k" * 16], 300, 0)
    assert potential.summary()["prompt_tokens"] == 0


def test_a_small_store_forgets_and_a_larger_one_does_not() -> None:
    plain = replica("a")
    potential = Potential({"a": plain}, lambda: 0.0)
    first = [number.to_bytes(16, "big") for number in range(3000)]
    second = [number.to_bytes(16, "little") for number in range(1, 3000)]
    for keys in (first, second, first):
        potential.saw(plain, keys, 3000 * 256, 0)
    small, large, _ = (item["hit_rate"] for item in potential.summary()["with_connector"])
    assert small < large == pytest.approx(1 / 3, rel=0.01)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 20), max_size=12, unique=True), max_size=30),
)
def test_nested_stores_have_what_each_would_have_alone(rooms: list[int], prompts: list[list[int]]) -> None:
    capacities = list(accumulate(rooms))
    nested, alone = NestedStores(capacities), [ApproximateIndex(capacity) for capacity in capacities]
    for prompt in prompts:
        keys = [bytes([number]) * 16 for number in prompt]
        assert nested.used(keys) == [store.hit(keys).gpu_chunks for store in alone]
        for store in alone:
            store.add(keys)


def test_it_is_said_in_the_log_once_for_what_is_new(caplog: pytest.LogCaptureFixture) -> None:
    now, plain = 0.0, replica("a")
    potential = Potential({"a": plain}, lambda: now)
    with caplog.at_level(logging.INFO):
        potential.tick()
        potential.saw(plain, [b"k" * 16], 300, 0)
        potential.tick()
        assert not caplog.records
        now = REPORT_SECONDS + 1
        potential.tick()
        now = 3 * REPORT_SECONDS
        potential.tick()
    [record] = caplog.records
    assert "1 engines without connector reuse 0% of 300 prompt tokens" in record.getMessage()
