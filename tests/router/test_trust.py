"""A view that goes on claiming what its engine does not find is believed less, and forgiven in time."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.keys import chunk_keys, root_key
from kvist_connector.protocol.engine import RequestRecord
from kvist_connector.protocol.feed import FEED_VERSION, Opening
from kvist_connector.protocol.tiers import Tier
from kvist_router.mind.interface import Decision, Metadata, Report
from kvist_router.mind.trust import DOUBT, Trust
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.feed import FakeAgent

FINGERPRINT = b"f" * 32
TOKENS = list(range(1000, 1000 + 4 * 256 + 100))
KEYS = chunk_keys(root_key(FINGERPRINT), TOKENS)


def opening() -> Opening:
    return Opening(
        version=FEED_VERSION, epoch=1, replica="r", fingerprint=FINGERPRINT, group=0, model="m",
        chunk_tokens=256, block_tokens=32, gpu_known=True, draining=False,
    )  # fmt: skip


def record(request: str, found: int) -> RequestRecord:
    return RequestRecord(
        request=request, prompt_tokens=len(TOKENS), last_chunk_key=KEYS[-1],
        hit_tokens={int(Tier.MEMORY): found},
        arrived=0.0, lookup_seconds=0.0, wait_seconds=0.0, load_seconds=0.0, prefill_seconds=0.1,
    )  # fmt: skip


async def served(running: Any, until: Any, agent: FakeAgent, found: float) -> int:
    """One request that finds a share of what was predicted; returns the prediction."""
    body = json.dumps({"model": "m", "prompt": TOKENS}).encode()
    decision = await running.mind.decide(body, Metadata("completions"))
    assert isinstance(decision, Decision)
    agent.record(record(decision.id, int(decision.predicted_tokens * found)))
    await until(lambda: running.mind.records.get(decision.id).actual is not None)
    await running.mind.report(decision.id, Report("ended"))
    return decision.predicted_tokens


async def test_a_view_that_claims_what_is_not_there_is_believed_less(router, until, http) -> None:
    async with FakeEngine() as engine, FakeAgent(opening(), {Tier.MEMORY: KEYS}) as agent:
        running = await router(replicas=[{"name": "r", "url": engine.url, "agent": agent.url}])
        predicted = [await served(running, until, agent, 0.0) for _ in range(12)]
        assert predicted[0] == 4 * 256
        assert predicted[-1] < 256
        assert predicted == sorted(predicted, reverse=True)
        await until(lambda: running.mind.metrics.trust.labels("r")._value.get() < DOUBT)
        async with http.get(running.admin_url + "/v1/kvist/replicas") as answer:
            (said,) = (await answer.json())["replicas"]
        assert said["trust"]["doubted"]
        async with http.get(running.admin_url + "/metrics") as answer:
            page = await answer.text()
        assert 'kvist_router_compared_tokens_total{of="found",replica="r"} 0.0' in page


async def test_a_view_whose_claims_are_found_is_believed_whole(router, until) -> None:
    """Some chunks go between lookup and prefill: that is no reason for doubt."""
    async with FakeEngine() as engine, FakeAgent(opening(), {Tier.MEMORY: KEYS}) as agent:
        running = await router(replicas=[{"name": "r", "url": engine.url, "agent": agent.url}])
        assert {await served(running, until, agent, 0.75) for _ in range(20)} == {4 * 256}


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6)), max_size=50))
def test_trust_is_a_share_and_comes_back_with_time(compared: list[tuple[int, int]]) -> None:
    trust = Trust()
    for predicted, found in compared:
        trust.compared(predicted, found)
        assert 0 <= trust.share <= 1
        assert trust.believed == (trust.share if trust.doubted else 1.0)
    for _ in range(900):
        trust.tick()
    assert not trust.doubted
