"""A cluster's life on the fake API server, seen through objects, status and events."""

from __future__ import annotations

from typing import Any

from kvist_operator.control.resources import Resource

World = Any
NAMESPACE = "team"
SERVICES = Resource("", "v1", "services", "Service")


async def test_an_applied_cluster_becomes_ready_and_then_nothing_is_written(world: World) -> None:
    world.apply(engine={"replicas": 2})
    await world.settle()
    assert world.says("Ready") == ("True", "Serving")
    assert world.says("EnginesReady") == ("True", "AllReady")
    assert world.says("CacheAware") == ("True", "Mirroring")
    assert world.says("Degraded") == ("False", "AsExpected")
    assert world.status()["replicas"] == 2
    assert world.status()["endpoint"] == "http://demo-router.team.svc:8080"
    before = world.api.writes()
    for _ in range(20):
        world.clock.seconds += 60
        await world.turn()
        world.controllers()
    assert world.api.writes() == before
