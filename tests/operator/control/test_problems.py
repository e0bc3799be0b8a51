"""What keeps a cluster from serving is named in its conditions, with the words of who knows it."""

from __future__ import annotations

from typing import Any

import pytest

from kvist_operator.control.resources import PODS

MANAGED_REDIS = {"remote": {"redis": {"managed": {}}}}
EXCEEDED = "pods is forbidden: exceeded quota: small, requested: pods=1, used: pods=2, limited: pods=2"


def message(world: Any, kind: str) -> str:
    """Of a condition."""
    return next(str(item["message"]) for item in world.status()["conditions"] if item["type"] == kind)


async def turns(world: Any, count: int = 6) -> None:
    """Of operator and controllers, whatever comes of it."""
    for _ in range(count):
        await world.turn()
        world.controllers()


async def pass_time(world: Any, seconds: float) -> None:
    """And what is seen then."""
    world.clock.seconds += seconds
    await turns(world, 2)


async def test_pods_that_the_api_server_refuses_are_told_in_its_words(world: Any) -> None:
    world.refusal = EXCEEDED
    world.apply()
    await turns(world)
    assert world.says("Degraded") == ("True", "PodsRefused")
    assert EXCEEDED in message(world, "Degraded")
    assert "StatefulSet demo-engine" in message(world, "Degraded")
    world.refusal = ""
    await world.settle()
    assert world.says("Degraded") == ("False", "AsExpected")
    assert world.says("Ready") == ("True", "Serving")


async def test_a_refusal_that_is_over_is_not_told_of_a_pod_that_is_missing_later(world: Any) -> None:
    world.refusal = EXCEEDED
    world.apply(engine={"replicas": 2})
    await turns(world, 2)
    world.refusal = ""
    await world.settle()
    await pass_time(world, 60)
    world.server.remove(PODS, "team", "demo-engine-1")
    await world.turn()
    assert world.says("Degraded") == ("False", "AsExpected")


async def test_routers_that_are_refused_are_told(world: Any) -> None:
    world.apply(engine={"replicas": 0})
    await turns(world)
    world.refusal = EXCEEDED
    await turns(world)
    assert world.says("Degraded") == ("True", "PodsRefused")
    assert "Deployment demo-router" in message(world, "Degraded")


async def test_a_gate_that_stays_shut_is_explained_by_what_routers_say(world: Any) -> None:
    world.programs.mirror = False
    world.programs.feed_problem = "401 from the agent: wrong token"
    world.apply()
    await turns(world)
    assert world.says("Ready") == ("False", "NotMirrored")
    assert "401 from the agent: wrong token" in message(world, "EnginesReady")
    assert world.says("Degraded") == ("False", "AsExpected")
    await pass_time(world, 90)
    assert world.says("Degraded") == ("True", "NotMirrored")
    world.programs.mirror = True
    await world.settle()
    assert world.says("Ready") == ("True", "Serving")
    assert world.says("Degraded") == ("False", "AsExpected")


async def test_a_gate_that_stays_shut_because_no_router_answers_says_so(world: Any) -> None:
    world.programs.silent = "no route to host"
    world.apply()
    await turns(world)
    assert world.says("Ready") == ("False", "RouterSilent")
    await pass_time(world, 90)
    assert world.says("Degraded") == ("True", "RouterSilent")
    assert "no route to host" in message(world, "Degraded")


async def test_one_router_of_two_that_routes_nothing_is_not_ready(world: Any) -> None:
    world.apply(router={"replicas": 2})
    await world.settle()
    assert world.says("Ready") == ("True", "Serving")
    name = next(iter(world.pods("router")))
    world.programs.idle_routers.add(name)
    await turns(world)
    assert world.says("Ready") == ("False", "NoRoute")
    assert world.says("Degraded") == ("True", "NoRoute")
    assert name in message(world, "Degraded")


async def test_a_managed_redis_that_starts_is_not_lost(world: Any) -> None:
    world.apply(cache=MANAGED_REDIS)
    await world.turn()
    assert world.says("BackendReady") == ("False", "Starting")
    assert world.says("Degraded") == ("False", "AsExpected")
    await world.settle()
    assert world.says("BackendReady") == ("True", "Reachable")
    assert "BackendLost" not in world.events()


async def test_a_redis_pod_that_cannot_start_is_named(world: Any) -> None:
    world.apply(cache=MANAGED_REDIS)
    await world.turn()
    world.controllers()
    world.broken_revisions.add(
        world.pods("redis")["demo-redis-0"]["metadata"]["labels"]["controller-revision-hash"]
    )
    await turns(world)
    assert world.says("Degraded") == ("True", "RedisBroken")
    assert "demo-redis-0: CrashLoopBackOff" in message(world, "Degraded")


async def test_one_engine_that_alone_does_not_reach_redis_is_named(world: Any) -> None:
    world.apply(engine={"replicas": 2}, cache=MANAGED_REDIS)
    await world.settle()
    world.programs.redis_problems["demo-engine-1"] = "connection refused"
    await turns(world)
    assert world.says("BackendReady") == ("True", "Reachable")
    assert world.says("Degraded") == ("True", "BackendLost")
    assert "demo-engine-1 does not reach redis, others do: connection refused" in message(world, "Degraded")


async def test_an_engine_that_hangs_while_it_loads_is_named_after_its_deadline(world: Any) -> None:
    world.started = False
    world.apply(engine={"startupDeadline": "10m"})
    await turns(world)
    await pass_time(world, 500)
    assert world.says("Degraded") == ("False", "AsExpected")
    await pass_time(world, 200)
    assert world.says("Degraded") == ("True", "EngineBroken")
    assert "engine.startupDeadline (600 s)" in message(world, "Degraded")


@pytest.mark.parametrize(
    ("state", "seconds", "words"),
    [
        ({"conditions": ["PodReadyToStartContainers"]}, 200, "its volumes or its network"),
        ({"creating": True}, 1000, "container engine is not created after 15 minutes"),
    ],
)
async def test_a_pod_that_is_not_started_by_its_node_is_named(
    world: Any, state: dict[str, Any], seconds: float, words: str
) -> None:
    world.started = False
    world.apply(engine={"startupDeadline": "1h"})
    await turns(world, 2)
    pod = world.pods("engine")["demo-engine-0"]
    conditions = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": world.stamp()},
        *({"type": kind, "status": "False"} for kind in state.get("conditions", ())),
    ]
    waiting = {"name": "engine", "ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}
    status = {**pod["status"], "conditions": conditions}
    if "creating" in state:
        status["containerStatuses"] = [waiting]
    world.server.put(PODS, {**pod, "status": status})
    await world.turn()
    assert world.says("Degraded") == ("False", "AsExpected")
    world.clock.seconds += seconds
    await world.turn()
    assert world.says("Degraded") == ("True", "EngineBroken")
    assert words in message(world, "Degraded")
