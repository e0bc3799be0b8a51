"""The chart's role and the calls that a cluster's life makes: each call is allowed, each right is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvist_operator.control.resources import CLUSTERS, EVENTS, OPTIONAL_KINDS, PODS, Resource, managed
from kvist_operator.control.sweep import Sweep

HELPERS = Path(__file__).parents[3] / "charts" / "kvist" / "templates" / "_helpers.tpl"
BEGIN = '{{- define "kvist.rules" -}}\n'
Call = tuple[str, str, str]
MANAGED = managed(OPTIONAL_KINDS)
SERVICE_MONITORS = next(resource for resource in MANAGED if resource.kind == "ServiceMonitor")
ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")


def rights(verb: str, *resources: Resource) -> set[Call]:
    return {(verb, resource.group, resource.plural) for resource in resources}


# Rights that the calls below do not show, by the reason why they are there.
ELSEWHERE: dict[str, set[Call]] = {
    "control/watch.py watches with kopf's own client": rights("watch", CLUSTERS, PODS, *MANAGED),
    "the API server asks for create when an apply makes an object": rights("create", *MANAGED),
    "what is only rendered in some releases is pruned by others": rights("delete", *MANAGED),
    "rendered where the API server has no PodMonitor": rights("get", SERVICE_MONITORS)
    | rights("patch", SERVICE_MONITORS),
    "an operator continues the event of another": rights("patch", EVENTS),
    "held to be handed on to routers": {
        call for verb in ("get", "list", "watch") for call in rights(verb, ENDPOINT_SLICES)
    },
}
EXCUSED: set[Call] = set().union(*ELSEWHERE.values())


def granted() -> set[Call]:
    """Verb, group, resource of every right in the namespaces of clusters."""
    text = HELPERS.read_text().split(BEGIN)[1].split("{{- end }}")[0]
    return {
        (verb, group, resource)
        for rule in yaml.safe_load(text)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


async def life(world: Any) -> set[Call]:
    """The calls from the creation of a cluster with everything to its deletion."""
    clear = {"remote": {"redis": {"urls": ["redis://cache:6379"]}, "whenDeleted": "Clear"}}
    world.apply(engine={"replicas": 2}, router={"autoscaling": {"maxReplicas": 4}}, cache=clear)
    await world.turn()
    await world.turn()  # its controllers were not there yet: why has it no pods?
    await world.settle()
    world.apply(engine={"replicas": 2, "shmSize": "1Gi"})
    await world.settle()
    world.programs.drained.add("demo-engine-1")
    world.apply(engine={"replicas": 1}, router={}, security={"networkPolicy": {"enabled": False}})
    await world.settle()
    await Sweep(world.api, lambda key: None, (None,)).turn(OPTIONAL_KINDS)
    world.delete()
    await world.turn()
    return set(world.api.calls)


async def test_every_call_of_a_clusters_life_is_allowed(world: Any) -> None:
    calls = await life(world)
    assert {verb for verb, _, _ in calls} >= {"get", "list", "create", "patch", "delete"}
    assert calls - granted() == set()


async def test_every_right_is_used(world: Any) -> None:
    calls = await life(world)
    assert sorted(granted() - calls - EXCUSED) == []


def test_every_excuse_is_for_a_right_that_is_there() -> None:
    assert sorted(EXCUSED - granted()) == []
