"""cache.remote.whenDeleted: Clear, from the finalizer to the end of the object."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from kvist_operator.control.farewell import CLEAR_SECONDS, FINALIZER, clears, farewell, mark_patch
from kvist_operator.control.pods import Pod
from kvist_operator.control.resources import CLUSTERS, EVENTS, PODS, SECRETS

NOW = datetime.datetime(2026, 1, 1, 0, 1, tzinfo=datetime.UTC)
REDIS = {"urls": ["rediss://cache.example.com:6379/0"]}
CLEAR = {"remote": {"redis": REDIS, "whenDeleted": "Clear"}}
KEEP = {"remote": {"redis": REDIS}}


def leaving(seconds: float, **remote: Any) -> dict[str, Any]:
    at = (NOW - datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    meta = {
        "name": "demo",
        "namespace": "team",
        "uid": "u",
        "deletionTimestamp": at,
        "finalizers": [FINALIZER],
    }
    return {"metadata": meta, "spec": {"cache": {"remote": {**CLEAR["remote"], **remote}}}}


def engine(name: str, **more: Any) -> Pod:
    return Pod(name, name, ordinal=int(name[-1]), component="engine", **{"address": "10.0.0.1", **more})


# ---- decisions


@pytest.mark.parametrize(
    ("remote", "wanted"),
    [
        ({"whenDeleted": "Clear", "redis": REDIS}, True),
        ({"whenDeleted": "Clear", "objectStore": {"url": "s3://bucket/a"}}, True),
        ({"whenDeleted": "Retain", "redis": REDIS}, False),
        ({"redis": REDIS}, False),
        ({"whenDeleted": "Clear", "redis": {"managed": {}}}, False),
        ({"whenDeleted": "Clear"}, False),
        ("wrong", False),
    ],
)
def test_only_what_outlives_the_cluster_is_cleared(remote: Any, wanted: bool) -> None:
    assert clears({"spec": {"cache": {"remote": remote}}}) is wanted


def test_the_finalizers_of_others_are_left_alone() -> None:
    meta = {"uid": "u", "resourceVersion": "7", "finalizers": ["example.com/other"]}
    patch = mark_patch({"metadata": meta}, on=True)
    assert patch == {"metadata": {**meta, "finalizers": ["example.com/other", FINALIZER]}}
    assert mark_patch(patch, on=True) is None
    assert mark_patch(patch, on=False) == {"metadata": meta}
    assert mark_patch({"metadata": meta}, on=False) is None


def test_agents_that_serve_are_asked_first_and_those_without_address_never() -> None:
    pods = [
        engine("engine-0", terminating=True, serving=True),
        engine("engine-1"),
        engine("engine-2", serving=True),
        engine("engine-3", address=""),
        engine("engine-4", terminating=True, stuck=True),
        Pod("router-0", "r", component="router", address="10.0.0.2", serving=True),
    ]
    decision = farewell(leaving(20), pods, NOW)
    assert [pod.name for pod in decision.ask] == ["engine-2", "engine-1", "engine-0"]
    assert decision.seconds == CLEAR_SECONDS - 20


def test_after_the_deadline_it_goes_and_says_why_chunks_stay() -> None:
    decision = farewell(leaving(CLEAR_SECONDS), [engine("engine-0")], NOW, "engine-0: HTTP 503")
    assert decision.ask == ()
    assert decision.stays == "they were not cleared within 60 s: engine-0: HTTP 503"


def test_without_agents_it_goes_at_once() -> None:
    assert "no agent is left" in farewell(leaving(0), [], NOW).stays
    assert farewell(leaving(0, whenDeleted="Retain"), [engine("engine-0")], NOW).stays == ""


# ---- the life of an object


def finalizers(world: Any) -> list[str]:
    found = world.server.read(CLUSTERS, "team", "demo")
    return list(found["metadata"].get("finalizers") or ())


def event(world: Any, reason: str) -> str:
    (found,) = [obj for obj in world.server.all(EVENTS) if obj["reason"] == reason]
    return str(found["message"])


async def test_only_clear_sets_the_finalizer_and_leaving_it_out_takes_it_away(world: Any) -> None:
    world.apply(cache=KEEP)
    await world.settle()
    assert finalizers(world) == []
    world.apply(cache=CLEAR)
    await world.settle()
    assert finalizers(world) == [FINALIZER]
    world.apply(cache=CLEAR, engine={"maxModelLen": "wrong"})
    world.apply(cache=KEEP)  # a spec that is wrong elsewhere keeps nobody
    await world.turn()
    assert finalizers(world) == []


async def test_agents_lose_their_own_chunks_before_one_clears_the_shared_tiers(world: Any) -> None:
    world.apply(cache=CLEAR, engine={"replicas": 2})
    await world.settle()
    world.delete()
    assert world.exists
    outcome = await world.turn()
    assert outcome.again is None
    assert not world.exists
    assert [(name, shared) for name, _, shared in world.programs.cleared] == [
        ("demo-engine-0", False),
        ("demo-engine-1", False),
        ("demo-engine-0", True),
    ]
    assert all(token for _, token, _ in world.programs.cleared)
    assert event(world, "Cleared") == "shared tiers were cleared: 7 chunks of redis"


async def test_another_agent_is_asked_when_one_does_not_answer(world: Any) -> None:
    world.apply(cache=CLEAR, engine={"replicas": 2})
    await world.settle()
    world.programs.no_agent.add("demo-engine-0")
    world.delete()
    await world.turn()
    assert not world.exists
    assert world.programs.cleared[-1][0] == "demo-engine-1"


async def test_it_is_tried_again_until_the_deadline_and_never_longer(world: Any) -> None:
    world.apply(cache=CLEAR)
    await world.settle()
    world.programs.clear_fails["demo-engine-0"] = "demo-engine-0: HTTP 503"
    world.delete()
    begun = world.clock.seconds
    while world.exists:
        outcome = await world.turn()
        world.clock.seconds += outcome.again or 0
    assert CLEAR_SECONDS <= world.clock.seconds - begun <= CLEAR_SECONDS + 2
    assert "not cleared within 60 s: demo-engine-0: HTTP 503; " in event(world, "ChunksStay")


async def test_without_pods_it_goes_at_once_and_says_so(world: Any) -> None:
    world.apply(cache=CLEAR)
    await world.turn()  # no controller has made a pod yet
    world.delete()
    await world.turn()
    assert not world.exists
    assert "no agent is left" in event(world, "ChunksStay")


async def test_a_namespace_whose_secrets_went_first_is_cleared_all_the_same(world: Any) -> None:
    world.apply(cache=CLEAR)
    await world.settle()
    world.server.remove(SECRETS, "team", "demo-token")
    world.delete()
    await world.turn()
    assert not world.exists
    assert world.programs.cleared[-1][1] != ""


async def test_one_that_cannot_be_read_any_more_goes_too(world: Any) -> None:
    world.apply(cache=CLEAR)
    await world.settle()
    world.apply(engine={"replicas": -1})
    world.delete()
    await world.turn()
    assert not world.exists
    assert world.programs.cleared[-1][2]


async def test_a_cluster_without_clear_is_gone_the_moment_it_is_deleted(world: Any) -> None:
    world.apply(cache=KEEP)
    await world.settle()
    world.delete()
    assert not world.exists
    assert world.server.all(PODS) == []
    assert (await world.turn()).gone
    assert world.programs.cleared == []
