"""Parameters of the policies change what they choose."""

from __future__ import annotations

from random import Random

from kvist_router.mind.choice import Candidate
from kvist_router.mind.cost import Cost
from kvist_router.mind.policies import policy
from kvist_router.mind.policies.weights import PolicyWeights


def replica(name: str, seconds: float, requests: int = 0, **more: float) -> Candidate:
    return Candidate(name, Cost.of(0.0, 0.0, 0.0, seconds, 0), requests, requests, **more)  # type: ignore[arg-type]


def test_the_tie_band_is_as_wide_as_told() -> None:
    candidates = [replica("quick", 1.0, requests=3), replica("idle", 1.2)]
    assert policy("kvist").choose(candidates, Random(0)).name == "quick"
    for weights in (PolicyWeights(tie_ratio=0.9), PolicyWeights(tie_seconds=0.9)):
        assert policy("kvist", weights).choose(candidates, Random(0)).name == "idle"


def test_answers_that_stand_still_count_as_told() -> None:
    candidates = [replica("answering", 1.0, decoding=10), replica("slower", 2.0)]
    assert policy("kvist").choose(candidates, Random(0)).name == "slower"
    assert policy("kvist", PolicyWeights(standstill=0)).choose(candidates, Random(0)).name == "answering"
    assert (
        policy("approximate", PolicyWeights(standstill=0)).choose(candidates, Random(0)).name == "answering"
    )


def test_a_prefix_stays_until_the_bound_told() -> None:
    prefix, idle = b"p" * 16, [replica(name, 1.0) for name in "abcd"]
    first = policy("prefix-affinity").choose(idle, Random(0), prefix).name
    busy = [replica(name, 1.0, requests=5 if name == first else 0) for name in "abcd"]
    assert policy("prefix-affinity").choose(busy, Random(0), prefix).name != first
    assert policy("prefix-affinity", PolicyWeights(bound=4)).choose(busy, Random(0), prefix).name == first
