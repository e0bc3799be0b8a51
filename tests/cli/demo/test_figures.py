"""Aggregation: every figure from turns made by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_cli.demo import figures
from kvist_cli.demo.figures import Replay, Traffic, TurnResult
from kvist_connector.planner import PrefillModel

COLD = TurnResult("a.1", "replica-0", False, 1000, 10, 0, {}, 2.0, (0.02, 0.04))
WARM = TurnResult("a.2", "replica-1", True, 1200, 10, 1024, {"gpu": 512, "memory": 512}, 0.4, (0.03,), 0.1)
REPLAY = Replay("kvist", (COLD, WARM), 4.0, Traffic({"memory": 7, "disk": 5}, {"memory": 3, "disk": 0}))


def test_hit_rates_are_shares_of_requests_tokens_and_prefill_seconds() -> None:
    rate = figures.hit_rate(REPLAY.turns, PrefillModel(linear=0.002))
    assert rate["requests"] == 0.5
    assert rate["tokens"] == pytest.approx(1024 / 2200)
    assert rate["seconds"] == pytest.approx((1024 * 0.002 - 0.1) / (2200 * 0.002))


def test_a_reuse_of_less_than_a_chunk_is_no_request_hit() -> None:
    turn = dataclasses.replace(WARM, hits={"gpu": 255})
    assert figures.hit_rate([turn], PrefillModel(0.002))["requests"] == 0


def test_cold_and_warm_times_are_kept_apart() -> None:
    document = figures.summary(REPLAY, PrefillModel(0.002))
    assert document["ttft_ms"] == {"cold": {"p50": 2000, "p95": 2000}, "warm": {"p50": 400, "p95": 400}}
    assert document["itl_ms"] == {"p50": 30}
    assert document["throughput_tok_s"] == (1000 + 1200 + 20) / 4.0


def test_bytes_have_the_same_tiers_in_every_mode() -> None:
    plain = figures.summary(Replay("round_robin", (COLD,), 1.0), PrefillModel(0.0))
    assert plain["bytes"] == {"stored": {"memory": 0, "disk": 0}, "loaded": {"memory": 0, "disk": 0}}
    assert figures.summary(REPLAY, PrefillModel(0.0))["bytes"]["stored"] == {"memory": 7, "disk": 5}


def test_a_mode_without_warm_turns_has_no_warm_times() -> None:
    assert figures.summary(Replay("kvist", (COLD,), 1.0), PrefillModel(0.0))["ttft_ms"]["warm"] == {
        "p50": None,
        "p95": None,
    }


def test_prefill_speed_comes_from_turns_that_computed() -> None:
    assert figures.prefill_model([REPLAY]).linear == 2.0 / 1000


def test_routes_show_promise_and_fact() -> None:
    assert figures.routes(REPLAY)[1] == {
        "turn": "a.2",
        "replica": "replica-1",
        "predicted_tokens": 1024,
        "actual_tokens": 1024,
    }


def test_shared_prefixes_count_once_in_distinct_tokens() -> None:
    assert figures.distinct_tokens([[1, 2, 3, 4], [1, 2, 5], [9], [1, 2, 3]]) == 6


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6))
def test_distinct_tokens_are_the_nodes_of_the_prefix_tree(prompts: list[list[int]]) -> None:
    nodes = {tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)}
    assert figures.distinct_tokens(prompts) == len(nodes)


def test_traffic_is_a_difference_of_counters() -> None:
    after = Traffic({"memory": 9, "disk": 5}, {"memory": 3})
    assert after.since(REPLAY.traffic) == Traffic({"memory": 2, "disk": 0}, {"memory": 0})
