"""Replays: the optimum is one, LRU is an independent simulator's LRU, traces are read or refused in words."""

import gzip
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_lines

from bench.eviction_traces import names, workload
from kvist_connector.errors import ConfigError
from kvist_connector.eviction import CostAware, Lru, optimum, read_trace, replay, trace_of

# Prompts that share beginnings: paths in a small tree.
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=8)


def blocks_trace(prompts):
    return trace_of((512 * len(ids), ids) for ids in prompts)


def best_by_search(trace, capacity):
    """Most hits over all ways to keep sets of blocks that are closed under parents."""
    states = {frozenset(): 0}
    for number in range(len(trace)):
        path = list(trace.request(number))
        after = {}
        for held, hits in states.items():
            found = sum(1 for _ in itertools.takewhile(held.__contains__, path))
            known = sorted(held | set(path))
            for size in range(min(capacity, len(known)) + 1):
                for kept in itertools.combinations(known, size):
                    whole = all(trace.parents[b] in (-1, *kept) for b in kept)
                    if whole:
                        after[frozenset(kept)] = max(after.get(frozenset(kept), 0), hits + found)
        states = after
    return max(states.values())


@settings(max_examples=40, deadline=None)
@given(prompts=PROMPTS.filter(lambda p: len({tuple(i[:n]) for i in p for n in range(1, 4)}) <= 9))
def test_no_way_to_keep_blocks_hits_more_than_the_optimum(prompts):
    trace = blocks_trace(prompts)
    assert optimum(trace, 3).hit_blocks == best_by_search(trace, 3)


@settings(max_examples=100, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 12))
def test_rules_lie_between_nothing_and_the_optimum(prompts, capacity):
    trace = blocks_trace(prompts)
    most = optimum(trace, capacity).hit_blocks
    for rule in (Lru(), CostAware()):
        assert 0 <= replay(trace, capacity, rule).hit_blocks <= most


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_an_independent_simulator_finds_the_same_hit_rate(name, share):
    trace = workload(name, seed=3, hours=0.1)
    capacity = int(trace.distinct * share)
    lines = [
        json.dumps({"input_length": trace.tokens(i, len(ids)), "hash_ids": list(ids)})
        for i in range(len(trace))
        for ids in [trace.request(i)]
    ]
    plan = build_execution_plan(parse_trace_lines(lines, block_size=512))
    first = plan.warmup_requests
    for ours, theirs in (
        (replay(trace, capacity, Lru(), first), simulate_policy(plan, "lru", capacity)),
        (optimum(trace, capacity, first), simulate_policy(plan, "optimal", capacity)),
    ):
        assert theirs.measurementMode == "fixed_window"
        assert ours.tokens == theirs.totalTokens
        assert ours.rate == pytest.approx(theirs.hitRate, abs=0.001)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("share", [0.03, 0.1])
def test_cost_is_never_much_worse_than_lru(name, share):
    trace = workload(name, seed=2, hours=0.1)
    capacity = int(trace.distinct * share)
    assert replay(trace, capacity, CostAware()).rate > replay(trace, capacity, Lru()).rate - 0.01


def test_what_one_replay_learned_serves_another_from_the_start():
    trace = workload("chat", seed=4, hours=0.05)
    seen, capacity = CostAware(), int(0.03 * trace.distinct)
    first = replay(trace, capacity, seen).rate
    assert replay(trace, capacity, CostAware(seen.learned())).rate > first


def test_answers_of_a_trace_are_learned_from(tmp_path):
    """Prompts with short answers come twice, after 150 others with long ones that come once."""

    def line(number, answer):
        return f'{{"input_length": 512, "output_length": {answer}, "hash_ids": [{number}]}}'

    lines = []
    for number in range(1500):
        lines += [line(10_000 + 5 * number + other, 60) for other in range(5)]
        lines += [line(number, 20), line(max(0, number - 30), 20)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    trace = read_trace(tmp_path / "t.jsonl")
    again = len(trace) // 7 // 2  # in the second half
    lru, cost = (replay(trace, 100, rule, first=len(trace) // 2).hit_blocks for rule in (Lru(), CostAware()))
    assert (lru, cost > 0.9 * again) == (0, True)


def test_a_replay_repeats():
    trace = workload("all", seed=5, hours=0.05)
    assert replay(trace, 300, CostAware()) == replay(trace, 300, CostAware())


def test_a_last_block_counts_its_own_tokens():
    hits = replay(trace_of([(600, ["a", "b"]), (600, ["a", "b"])]), 10, Lru())
    assert (hits.tokens, hits.hit_tokens) == (1200, 600)


def test_equal_ids_after_other_blocks_are_other_blocks():
    assert replay(trace_of([(1024, [1, 2]), (1024, [3, 2])]), 10, Lru()).hit_blocks == 0


def test_plain_and_gzip_traces_are_read(tmp_path):
    line = b'{"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [4, 5]}\n\n'
    (tmp_path / "t.jsonl").write_bytes(line * 2)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(line * 2))
    for file in ("t.jsonl", "t.jsonl.gz"):
        trace = read_trace(tmp_path / file)
        assert (len(trace), trace.distinct, trace.tokens(0, 2)) == (2, 2, 700)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no request in it"),
        ("{", "request 1: no JSON"),
        ('{"input_length": 5, "output_length": -1, "hash_ids": [1]}', "output_length is -1"),
        ('{"hash_ids": [1]}', "request 1: input_length is None"),
        ('{"input_length": true, "hash_ids": [1]}', "input_length is True"),
        ('{"input_length": 5, "hash_ids": [1.5]}', "hash_ids is no list of block ids"),
        ("[]", "input_length is None"),
    ],
)
def test_a_bad_trace_is_refused_with_file_and_request(tmp_path, text, words):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        read_trace(file)


def test_a_missing_or_cut_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b'{"input_length": 1, "hash_ids": [1]}\n' * 99)[:-9])
    with pytest.raises(ConfigError, match=r"cut\.gz"):
        read_trace(tmp_path / "cut.gz")
