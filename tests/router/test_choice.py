"""Costs and choice, pure: what is compared, what counts as equal, how ties end."""

from __future__ import annotations

import json
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.planner import PrefillModel, TierPrice
from kvist_connector.protocol.tiers import Tier
from kvist_router.mind.choice import (
    STANDSTILL,
    TIE_RATIO,
    TIE_SECONDS,
    TURNOVER,
    WORK,
    Candidate,
    delays,
    tie_band,
    work,
)
from kvist_router.mind.cost import CORRECTION_RANGE, Cost, Match, Speeds, corrected, prompt_cost
from kvist_router.mind.lately import LATELY_SECONDS, Lately
from kvist_router.mind.mirror import NO_HIT, ApproximateIndex, Hit
from kvist_router.mind.pending import Pending
from kvist_router.mind.policies import POLICIES, policy
from kvist_router.relay.edits import edit_body

MEMORY = bytes([Tier.MEMORY])
DISK = bytes([Tier.DISK])
SPEEDS = Speeds(
    prefill=PrefillModel(1e-3),
    prices={Tier.MEMORY: TierPrice(0.001, 1e9), Tier.DISK: TierPrice(0.01, 1e8)},
    chunk_bytes=10**6,
)


def cost(match: Match, tokens: int = 1000, queue: float = 0.0, speeds: Speeds = SPEEDS) -> Cost:
    return prompt_cost(match, tokens, 256, 32, speeds, queue)


def candidate(name: str, seconds: float, outstanding: int = 0, requests: int = 0) -> Candidate:
    return Candidate(name, Cost.of(0.0, 0.0, 0.0, seconds, 0), outstanding, requests)


def test_nothing_cached_costs_the_whole_prefill_behind_the_queue() -> None:
    found = cost(Match(NO_HIT, 0), queue=0.5)
    assert found.total == pytest.approx(1.5)
    assert found.reused == 0


def test_memory_costs_its_load_and_the_rest() -> None:
    found = cost(Match(Hit(0, MEMORY * 2), 0))
    assert found.reused == 512
    assert found.load == pytest.approx(0.001 + 2e6 / 1e9)
    assert found.recompute == pytest.approx(0.488)


def test_what_the_gpu_holds_is_not_loaded_again() -> None:
    found = cost(Match(Hit(2, MEMORY * 3), 512))
    assert found.reused == 768
    assert found.load == pytest.approx(0.001 + 1e6 / 1e9)


def test_a_slow_tier_is_left_alone_when_computing_is_faster() -> None:
    slow = Speeds(PrefillModel(1e-6), {Tier.DISK: TierPrice(1.0, 1e6)}, 10**6)
    assert cost(Match(Hit(0, DISK * 3), 0), speeds=slow).reused == 0
    assert cost(Match(Hit(0, DISK * 3), 0)).reused == 768


def test_pending_chunks_cost_the_time_until_they_are_ready_beyond_the_queue() -> None:
    found = cost(Match(NO_HIT, 0, 3, 0.4), queue=0.1)
    assert (found.reused, found.pending) == (768, pytest.approx(0.3))


@given(
    tokens=st.integers(1, 5000),
    gpu=st.integers(0, 6000),
    stored=st.integers(0, 25),
    pending=st.integers(0, 5),
)
def test_reuse_is_whole_blocks_and_leaves_a_token_to_compute(
    tokens: int, gpu: int, stored: int, pending: int
) -> None:
    found = cost(Match(Hit(gpu // 256, MEMORY * stored), gpu // 32 * 32, pending, 0.1), tokens)
    assert 0 <= found.reused < tokens
    assert found.reused % 32 == 0
    assert found.total >= 0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(),
)
def test_kvist_takes_one_of_the_equal_least_with_fewest_outstanding(items, seed: int) -> None:
    candidates = [candidate(str(n), *item) for n, item in enumerate(items)]
    chosen = policy("kvist").choose(candidates, Random(seed)).name
    costs = [item.cost.total + work(item, 0.0) for item in candidates]
    ttft = candidates[costs.index(min(costs))].cost.total
    limit = min(costs) + max(TIE_RATIO * ttft, TIE_SECONDS)
    band = [item for item, cost in zip(candidates, costs, strict=True) if cost <= limit]
    assert tie_band(candidates) == band
    fewest = min(item.outstanding_tokens for item in band)
    assert chosen in {item.name for item in band if item.outstanding_tokens == fewest}


@given(
    extra=st.integers(1, 12), shared=st.integers(0, 11), rest=st.integers(1, 600), quick=st.booleans(),
    seed=st.integers(),
)  # fmt: skip
def test_a_conversation_stays_where_its_longer_prefix_is(
    extra: int, shared: int, rest: int, quick: bool, seed: int
) -> None:
    """On idle replicas: beyond the tie band by cost, inside it by what is reused."""
    speeds = Speeds(PrefillModel(1e-6 if quick else 1e-3), SPEEDS.prices, SPEEDS.chunk_bytes)
    own = Match(Hit(shared + extra, MEMORY * (shared + extra)), (shared + extra) * 256)
    other = Match(Hit(shared, MEMORY * shared), shared * 256)
    tokens = (shared + extra) * 256 + rest
    costs = {"other": other, "own": own, "another": other}
    candidates = [
        Candidate(name, found, 0, 0, prompt=tokens)
        for name, match in costs.items()
        for found in [cost(match, tokens, speeds=speeds)]
    ]
    assert policy("kvist").choose(candidates, Random(seed)).name == "own"


def test_more_reuse_does_not_beat_a_busy_replica_inside_the_band() -> None:
    busy = Candidate("busy", Cost.of(0.0, 0.0, 0.0, 0.1, 512), 300, 1)
    assert policy("kvist").choose([busy, candidate("idle", 0.1)], Random(0)).name == "idle"


def test_before_an_engine_has_measured_its_prefill_stored_chunks_beat_computing() -> None:
    slow = {Tier.DISK: TierPrice(0.01, 1e7)}  # 0.1 s a chunk, by the prior computing takes a quarter of that
    start = Speeds(prices=slow, chunk_bytes=10**6, measured=False)
    held = cost(Match(Hit(0, DISK * 3), 0), speeds=start)
    assert held.reused == 768
    assert held.total < cost(Match(NO_HIT, 0), speeds=start).total
    assert cost(Match(Hit(0, DISK * 3), 0), speeds=Speeds(prices=slow, chunk_bytes=10**6)).reused == 0


def test_equal_replicas_share_a_burst() -> None:
    chosen = {
        policy("kvist").choose([candidate(name, 0.1) for name in "abcd"], Random(seed)).name
        for seed in range(64)
    }
    assert chosen == set("abcd")


def test_round_robin_takes_each_in_turn_though_replicas_come_and_go() -> None:
    turns = policy("round-robin")
    every = [candidate(name, 1.0) for name in "bac"]
    assert [turns.choose(every, Random(0)).name for _ in range(4)] == ["a", "b", "c", "a"]
    assert turns.choose(every[1:], Random(0)).name == "c"
    assert turns.choose(every, Random(0)).name == "a"


def test_others_wait_for_our_prefill_and_our_space_and_answers_stand_still_meanwhile() -> None:
    found = Candidate("a", Cost.of(1.0, 0.0, 0.0, 2.0, 0), 0, 9, waiting=3, decoding=6, occupied=0.5)
    assert delays(found) == pytest.approx(3 * 2.0 + STANDSTILL * 6 * 2.0 + (3 + 6) * 0.5)
    assert delays(candidate("idle", 2.0)) == 0


def test_where_more_is_computed_lately_than_elsewhere_computing_is_dearer() -> None:
    """A tenth more to compute, but what is evicted there has been kept for longer."""
    busy = Candidate("busy", Cost.of(0.0, 0.0, 0.0, 1.0, 0), 0, 0, lately=3000, prompt=10)
    calm = Candidate("calm", Cost.of(0.0, 0.0, 0.0, 1.1, 0), 0, 0, lately=1000, prompt=10)
    assert policy("kvist").choose([busy, calm], Random(0)).name == "calm"
    assert work(busy, 2000) == pytest.approx(1.0 * (WORK + TURNOVER * 1000 / 2010))
    assert work(calm, 2000) == pytest.approx(1.1 * (WORK - TURNOVER * 1000 / 2010))
    assert work(candidate("nothing computed yet", 1.0), 0) == WORK


def test_a_few_prompts_more_say_nothing_of_what_is_evicted() -> None:
    """One has computed the last prompt, and goes on with it."""
    last = Candidate("last", Cost.of(0.0, 0.0, 0.0, 0.8, 200), 0, 0, lately=1000, prompt=1000)
    other = Candidate("other", Cost.of(0.0, 0.0, 0.0, 1.0, 0), 0, 0, prompt=1000)
    assert policy("kvist").choose([other, last], Random(0)).name == "last"


def test_a_prefix_that_is_being_computed_is_waited_for_within_a_bound() -> None:
    """An idle replica would answer as early, or a third earlier, and compute it once more."""
    idle = Candidate("idle", Cost.of(0.0, 0.0, 0.0, 1.0, 0), 0, 0)
    for wait, taken in ((1.0, "leader"), (1.4, "leader"), (1.6, "idle")):
        leader = Candidate("leader", Cost.of(wait, 0.0, 0.0, 0.01, 6000), 6000, 1, waiting=1, prompt=6100)
        assert policy("kvist").choose([leader, idle], Random(0)).name == taken


@pytest.mark.parametrize(("share", "taken"), [(0.1, "calm"), (0.5, "holder")])
def test_a_beginning_that_many_share_does_not_gather_their_prompts_in_one_place(
    share: float, taken: str
) -> None:
    """A few milliseconds less to compute decide only where a conversation goes on."""
    prompt = round(512 / share)
    holder = Candidate("holder", Cost.of(0.0, 0.0, 0.0, 0.999, 512), 0, 0, lately=1100, prompt=prompt)
    calm = Candidate("calm", Cost.of(0.0, 0.0, 0.0, 1.0, 0), 0, 0, lately=1000, prompt=prompt)
    assert policy("kvist").choose([holder, calm], Random(0)).name == taken


def test_what_was_computed_long_ago_counts_less() -> None:
    lately = Lately()
    lately.add(1000, 5.0)
    assert lately.tokens(5.0) == 1000
    assert lately.tokens(5.0 + LATELY_SECONDS) == pytest.approx(1000 / math.e)
    lately.add(1000, 5.0 + LATELY_SECONDS)
    assert lately.tokens(5.0 + LATELY_SECONDS) == pytest.approx(1000 / math.e + 1000)


def test_a_prefix_is_not_computed_twice_to_save_one_request_a_wait_that_all_others_get() -> None:
    """Both are full; the wait is shorter where the prefix is not, but ten wait there already."""
    held = Candidate("held", Cost.of(1.0, 0.0, 0.0, 0.1, 6000, 2.0), 0, 30, 10, 20, 0.1)
    shorter = Candidate("shorter", Cost.of(1.0, 0.0, 0.0, 0.7, 0, 1.0), 0, 30, 10, 20, 0.7)
    assert shorter.cost.total < held.cost.total
    assert policy("kvist").choose([held, shorter], Random(0)).name == "held"


def test_least_load_counts_requests() -> None:
    candidates = [candidate("a", 0.0, requests=2), candidate("b", 9.0, requests=1)]
    assert policy("least-load").choose(candidates, Random(0)).name == "b"


prefixes = st.binary(min_size=16, max_size=16)
loads = st.lists(st.integers(0, 30), min_size=2, max_size=8)


@given(prefixes, loads, st.integers())
def test_prompts_that_begin_alike_stay_together_until_their_replica_has_more_than_its_share(
    prefix: bytes, requests: list[int], seed: int
) -> None:
    affinity = policy("prefix-affinity")
    idle = [candidate(f"r{number}", 1.0) for number in range(len(requests))]
    first = affinity.choose(idle, Random(seed), prefix).name
    assert affinity.choose(idle[::-1], Random(seed + 1), prefix).name == first
    busy = [candidate(f"r{number}", 1.0, requests=count) for number, count in enumerate(requests)]
    chosen = affinity.choose(busy, Random(seed), prefix).name
    bound = math.ceil(1.25 * (sum(requests) + 1) / len(requests))
    counts = {item.name: item.outstanding_requests for item in busy}
    assert counts[chosen] < bound
    if counts[first] < bound:
        assert chosen == first


@given(prefixes, st.integers(2, 8), st.integers(0, 7))
def test_a_replica_that_leaves_moves_only_its_own_prefixes(prefix: bytes, count: int, gone: int) -> None:
    affinity, every = policy("prefix-affinity"), [candidate(f"r{number}", 1.0) for number in range(count)]
    before = affinity.choose(every, Random(0), prefix).name
    left = [item for item in every if item.name != f"r{gone}"]
    if before != f"r{gone}":
        assert affinity.choose(left, Random(0), prefix).name == before


def test_prefixes_spread_over_replicas_and_prompts_without_one_go_where_fewest_are() -> None:
    affinity, every = policy("prefix-affinity"), [candidate(name, 1.0) for name in "abcd"]
    found = [affinity.choose(every, Random(0), bytes([n]) * 16).name for n in range(200)]
    assert {name: found.count(name) > 25 for name in "abcd"} == dict.fromkeys("abcd", True)
    busy = [candidate("a", 1.0, requests=2), candidate("b", 1.0, requests=1)]
    assert affinity.choose(busy, Random(0)).name == "b"


@pytest.mark.parametrize("name", POLICIES)
@given(loads=loads, seed=st.integers(), prefix=st.just(b"") | prefixes)
def test_every_policy_takes_one_of_the_candidates_and_says_why(
    name: str, loads: list[int], seed: int, prefix: bytes
) -> None:
    candidates = [candidate(f"r{number}", load / 10, load, load) for number, load in enumerate(loads)]
    choice = policy(name).choose(candidates, Random(seed), prefix)
    assert choice.name in {item.name for item in candidates}
    assert choice.reason


@given(st.floats(0.5, 2), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_correction_stays_in_its_range(correction: float, predicted: float, observed: float) -> None:
    assert CORRECTION_RANGE[0] <= corrected(correction, predicted, observed) <= CORRECTION_RANGE[1]


def test_pending_entries_end_by_commit_failure_and_time() -> None:
    pending = Pending(3)
    pending.add([b"a", b"b"], ready=5.0, expires=9.0, owner="one")
    pending.add([b"b", b"c"], ready=7.0, expires=9.0, owner="two")
    assert pending.run([b"a", b"b", b"c", b"d"], 0, now=1.0) == (3, 7.0)
    pending.drop([b"b", b"c"], "two")
    assert pending.run([b"a", b"b", b"c"], 0, now=1.0) == (2, 5.0)
    pending.committed([b"a"])
    assert pending.run([b"a", b"b"], 0, now=1.0) == (0, 1.0)
    assert pending.run([b"a", b"b"], 1, now=1.0)[0] == 1
    assert pending.run([b"a", b"b"], 1, now=9.0)[0] == 0
    pending.expire(9.0)
    assert len(pending) == 0
    pending.add([bytes([n]) for n in range(10)], 1.0, 9.0, "three")
    assert len(pending) == 3


def test_the_approximate_index_forgets_tails_before_prefixes() -> None:
    index = ApproximateIndex(3)
    index.add([b"a", b"b", b"c", b"d"])
    assert index.hit([b"a", b"b", b"c", b"d"]).gpu_chunks == 3
    assert len(index) == 3


edited_names = st.sampled_from(["kvist", "cache_salt", "kv_transfer_params"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(
    fields=st.dictionaries(
        st.text() | st.sampled_from(["kvist", "cache_salt", "kv_transfer_params"]), json_values
    ),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    tags=st.none() | st.lists(st.text(), max_size=2).map(tuple),
    salt=st.none() | st.text(),
)
def test_edits_change_their_members_and_nothing_else(fields, indent, ascii_only: bool, tags, salt) -> None:
    body = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "replace")
    expected = json.loads(body)
    edited = edit_body(body, tags, salt)
    if tags is None and salt is None:
        assert edited is None
        return
    if salt is not None:
        expected["cache_salt"] = salt
    if tags is not None:
        expected.pop("kvist", None)
        expected["kv_transfer_params"] = {"tags": list(tags)}
    assert edited is not None
    assert json.loads(edited) == expected
