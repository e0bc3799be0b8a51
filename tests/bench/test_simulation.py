"""The simulated engine and cluster: times by hand, reuse, pressure, and that the router's own code routes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import capacity73, harness, routing
from bench.simulation import rivals
from bench.simulation.cluster import Summary, engines, simulate
from bench.simulation.engine import Engine, EngineSpec
from bench.simulation.feeds import Feeds
from bench.simulation.generated import agents, conversations, documents, prompts, shared_prompts
from bench.simulation.ours import Kvist, Lags, Routers
from bench.simulation.trace import Request, read_trace
from kvist_router.mind.policies import policy


def prefill(tokens: int) -> float:
    return (4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142) / 1000


def decode(context: int, blocks: int) -> float:
    share = context / (blocks * 512)
    return (-25.74 * share * share + 54.01 * share + 5.74) / 1000


def one(requests: list[Request], spec: EngineSpec):
    cluster = [Engine(spec)]
    return simulate(requests, cluster, rivals.RoundRobin(cluster, 0)), cluster[0]


def test_a_first_token_comes_out_of_the_prefill() -> None:
    found, _ = one([Request(0, 5.0, 1000, 1, (1,))], EngineSpec(100))
    assert found.mean == found.seconds - 5.0 == pytest.approx(prefill(1000))


def test_a_long_prompt_is_computed_in_chunks() -> None:
    found, _ = one([Request(0, 0.0, 10_000, 1, ())], EngineSpec(100))
    assert found.mean == pytest.approx(prefill(8192) + prefill(10_000 - 8192))


def test_the_answer_takes_a_step_for_each_token_longer_as_the_context_grows() -> None:
    found, engine = one([Request(0, 0.0, 510, 5, ())], EngineSpec(10))
    expected = prefill(510) + sum(decode(510 + made, 10) for made in (1, 2, 3, 4))
    assert found.seconds == pytest.approx(expected)
    assert engine.pool.active == 0


def test_a_prefill_holds_up_the_answers_that_are_being_made() -> None:
    trace = [Request(0, 0.0, 510, 5, ()), Request(1, 0.001, 800, 1, ())]
    found, _ = one(trace, EngineSpec(10))
    together = prefill(800) + decode(511, 10)
    expected = prefill(510) + together + sum(decode(510 + made, 10) for made in (2, 3, 4))
    assert found.seconds == pytest.approx(expected)
    assert found.mean == pytest.approx(prefill(510) + (together - 0.001) / 2)


def test_a_repeated_prompt_computes_only_what_is_new() -> None:
    first, again = Request(0, 0.0, 2000, 1, (1, 2, 3)), Request(1, 10.0, 2000, 1, (1, 2, 3))
    found, _ = one([first, again], EngineSpec(100))
    assert found.hit == pytest.approx(1536 / 4000)


def test_what_is_evicted_is_gone_unless_memory_has_it() -> None:
    prompts = [Request(0, 0.0, 1536, 1, (1, 2, 3)), Request(1, 5.0, 2048, 1, (4, 5, 6, 7)),
               Request(2, 10.0, 1537, 1, (1, 2, 3))]  # fmt: skip
    gone, _ = one(prompts, EngineSpec(4))
    kept, _ = one(prompts, EngineSpec(4, host_blocks=10, host_seconds=0.001))
    assert gone.hit == 0.0
    assert kept.hit == pytest.approx(1536 / 5121)


def test_memory_has_what_is_computed_and_forgets_what_was_unused_for_longest() -> None:
    trace = [Request(0, 0.0, 1536, 1, (1, 2, 3)), Request(1, 5.0, 1024, 1, (4, 5)),
             Request(2, 10.0, 1537, 1, (1, 2, 3)), Request(3, 15.0, 512, 1, (6,))]  # fmt: skip
    _, engine = one(trace, EngineSpec(100, host_blocks=4, host_seconds=0.001))
    assert set(engine.pool.host) == {1, 2, 3, 6}


def test_without_blocks_for_two_the_younger_is_preempted_and_both_end() -> None:
    found, engine = one([Request(0, 0.0, 1000, 600, ()), Request(1, 0.0, 1000, 600, ())], EngineSpec(6))
    assert engine.preemptions > 0
    assert found.completed == 2


def test_a_prompt_that_can_never_fit_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="raise blocks above 3"):
        one([Request(7, 0.0, 5000, 1, ())], EngineSpec(3))


requests = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 2500), st.integers(1, 1200), st.integers(0, 2)), max_size=12,
    min_size=1,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(rows=requests, blocks=st.integers(8, 24), host=st.sampled_from([0, 6]))
def test_every_request_ends_and_every_block_comes_back(rows, blocks: int, host: int) -> None:
    trace = [
        Request(n, at, tokens, output, tuple(kind * 100 + i for i in range(tokens // 512)))
        for n, (at, tokens, output, kind) in enumerate(sorted(rows))
    ]
    found, engine = one(trace, EngineSpec(blocks, host_blocks=host, host_seconds=0.01))
    assert found.completed == len(trace)
    assert engine.pool.active == 0
    assert len(engine.pool.idle) <= blocks
    assert len(engine.pool.host) <= host
    assert 0 <= found.hit < 1


@pytest.mark.parametrize("name", routing.ROUTERS)
def test_every_router_serves_all_and_repeats_by_its_seed(name: str) -> None:
    trace = conversations(1, 2.0, 30.0)

    def once():
        cluster = engines(EngineSpec(2500))
        return simulate(trace, cluster, routing.ROUTERS[name](cluster, 3))

    found = once()
    assert found.completed == len(trace)
    assert found == once()


def test_under_pressure_prefixes_stay_where_they_are_and_others_do_not_wait_for_it() -> None:
    """More prompts than the engines can hold at once, as many as they can serve: spreading one costs all."""
    trace, found = prompts(0, 27.0, 60.0), {}
    for name in ("kvist", "llm-d precise", "round robin"):
        cluster = engines(EngineSpec(400))
        found[name] = simulate(trace, cluster, routing.ROUTERS[name](cluster, 0))
    assert found["kvist"].hit > 0.9 * found["llm-d precise"].hit
    assert found["kvist"].mean < 0.25 * found["round robin"].mean


def several(trace: list[Request], spec: EngineSpec, count: int, lags: Lags) -> Summary:
    cluster = engines(spec)
    found = simulate(trace, cluster, Routers(cluster, 0, lambda: policy("kvist"), count, lags))
    assert found.completed == len(trace)
    return found


@pytest.mark.parametrize("lags", [Lags(0.2), Lags(0.2, 0.01)])
def test_several_routers_and_late_feeds_still_reuse(lags: Lags) -> None:
    trace = conversations(2, 2.0, 60.0)
    spec = EngineSpec(2500)
    assert several(trace, spec, 4, lags).hit > 0.8 * several(trace, spec, 1, Lags()).hit


def test_routers_that_tell_each_other_choose_as_one_does() -> None:
    """Eight of them, on engines that are just full: each alone would fill the same one."""
    trace, lag = shared_prompts(0, 24.0, 50.0), 0.05
    alone, told, silent = [
        several(trace, capacity73.SPEC, *form).mean
        for form in ((1, Lags(lag)), (8, Lags(lag, 0.005)), (8, Lags(lag)))
    ]
    assert abs(told - alone) < 0.5 * abs(silent - alone)


def test_a_feed_that_lags_brings_everything_later() -> None:
    cluster = engines(EngineSpec(100), 1)
    reader = Feeds(cluster).reader(lag=1.0)
    cluster[0].pool.changes.append((False, True, 7))
    assert reader.read(5.0) == [[]]
    cluster[0].pool.changes.append((False, True, 8))
    assert [told.changes for told in reader.read(6.0)[0]] == [((False, True, 7),)]
    assert [told.changes for told in reader.read(7.5)[0]] == [((False, True, 8),)]


def test_kvist_reuses_more_and_answers_earlier_than_round_robin() -> None:
    trace, found = conversations(2, 2.0, 120.0), {}
    for name in ("kvist", "round robin"):
        cluster = engines(EngineSpec(2500))
        found[name] = simulate(trace, cluster, routing.ROUTERS[name](cluster, 0))
    assert found["kvist"].hit > 1.3 * found["round robin"].hit
    assert found["kvist"].mean < found["round robin"].mean


def test_the_routers_mirror_is_what_the_engines_hold() -> None:
    trace, cluster = conversations(3, 2.0, 60.0), engines(EngineSpec(600), 2)
    router = Kvist(cluster, 0, policy("kvist"))
    simulate(trace, cluster, router)
    last = Request(10**6, 1e6, trace[0].tokens, 1, trace[0].blocks)
    router.choose(last, last.at)
    assert router.predicted(last) == max(engine.pool.hit(last.blocks) for engine in cluster) * 512


def test_the_shared_workload_has_its_groups_and_lengths() -> None:
    found = shared_prompts(0, 20.0, 60.0)
    assert {request.tokens for request in found} == {7200}
    assert len({request.blocks[0] for request in found}) > 140
    assert found == shared_prompts(0, 20.0, 60.0)


@pytest.mark.parametrize("make", [agents, documents, prompts])
def test_made_up_requests_repeat_by_their_seed_and_share_beginnings(make) -> None:
    found = make(0, 1.0, 60.0)
    assert found == make(0, 1.0, 60.0) != make(1, 1.0, 60.0)
    assert [request.at for request in found] == sorted(request.at for request in found)
    assert len({request.blocks[0] for request in found}) < len(found)
    assert all(len(request.blocks) == request.tokens // 512 for request in found)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_is_read_by_its_path_at_a_speed(tmp_path: Path, zipped: bool) -> None:
    line = {"timestamp": 2000, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 7]}
    data = (json.dumps(line) + "\n").encode()
    path = tmp_path / ("some_trace.jsonl.gz" if zipped else "some_trace.jsonl")
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert read_trace(path, 4.0) == [Request(0, 0.5, 1100, 7, (5, 6))]


def test_a_win_excludes_zero_and_exceeds_the_calibration_error() -> None:
    theirs = [1.0, 1.1, 1.2]
    ours = [value - 0.1 + wobble for value, wobble in zip(theirs, (0.0, 0.001, -0.001), strict=True)]
    assert routing.verdict(ours, theirs, 0.0) == "win"
    assert routing.verdict(ours, theirs, 0.2) == "tie"
    assert routing.verdict(theirs, ours, 0.01) == "loss"
    assert routing.verdict(ours, ours, 0.0) == "tie"


@pytest.mark.parametrize("bench", [routing, capacity73])
def test_the_benches_run(bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(capacity73, "RATES", (3.0,))
    arguments = ["--quick", *(["--only", "x1 600"] if bench is routing else [])]
    name = bench.__name__.split(".")[1]
    assert harness.main(name, bench.run, bench._arguments, arguments) == 0
    assert "mean TTFT" in capsys.readouterr().out.splitlines()[-1]


def test_a_hot_prefix_gets_copies_and_others_do_not() -> None:
    """Three of four requests begin alike, more than one engine can answer; the rest have 30 beginnings."""
    hot, fresh, trace = range(8), 10**6, []
    for number in range(900):
        group = range(100 + number % 30 * 8, 108 + number % 30 * 8) if number % 4 == 0 else hot
        blocks = (*group, fresh + 2 * number, fresh + 2 * number + 1)
        trace.append(Request(number, number / 30, 10 * 512 + 100, 300, blocks))
    cluster = engines(EngineSpec(1500))
    simulate(trace, cluster, Kvist(cluster, 0, policy("kvist")))

    def copies(first: int) -> int:
        return sum(engine.pool.hit(range(first, first + 8)) == 8 for engine in cluster)

    assert copies(0) >= 4
    assert sum(copies(100 + 8 * group) for group in range(30)) <= 36


def test_of_a_burst_that_begins_alike_the_first_computes_and_the_rest_follow() -> None:
    """Twelve at once: few compute the beginning, for that no one waits behind all others."""
    trace = [Request(n, n * 0.001, 40 * 512 + 200, 50, tuple(range(40))) for n in range(12)]
    cluster = engines(EngineSpec(2500))
    found = simulate(trace, cluster, Kvist(cluster, 0, policy("kvist")))
    computed = sum(engine.pool.hit(range(40)) == 40 for engine in cluster)
    assert computed <= 4
    assert found.mean < 2 * prefill(8192) * 40 * 512 / 8192
