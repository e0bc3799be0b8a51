"""Kinds of the Prometheus operator that come and go while clusters live."""

from __future__ import annotations

from typing import Any

import pytest

from kvist_operator.control.api import Key
from kvist_operator.control.errors import NotFound
from kvist_operator.control.resources import OPTIONAL_GROUP, Resource
from kvist_operator.control.sweep import Sweep

World = Any
SERVICE_MONITORS = Resource("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor")


async def test_the_sweep_adds_every_cluster_when_they_come_or_go(world: World) -> None:
    world.apply()
    added: list[Key] = []
    sweep = Sweep(world.api, added.append, [None])
    await sweep.turn(frozenset())
    for kinds in (frozenset({"PodMonitor"}), frozenset[str]()):
        added.clear()
        await sweep.turn(kinds)
        assert added == [world.key]
        assert await sweep.turn(kinds) == 0


async def test_a_removed_kind_is_asked_about_again(world: World) -> None:
    world.apply()
    await world.settle()
    assert world.server.all(OPTIONAL_GROUP)
    world.server.uninstall(OPTIONAL_GROUP)
    with pytest.raises(NotFound, match="podmonitors"):
        await world.turn()
    await world.turn()
    assert world.says("Degraded")[0] == "False"
    # Where only the other kind of monitor is left, that one is rendered.
    assert world.server.all(SERVICE_MONITORS)
