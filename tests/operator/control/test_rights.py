"""The chart's role and the calls that a cluster's life makes: each call is allowed, each right is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvist_operator.control.resources import CLUSTERS

HELPERS = Path(__file__).parents[3] / "charts" / "kvist" / "templates" / "_helpers.tpl"
BEGIN = '{{- define "kvist.rules" -}}\n'
MONITORING = "monitoring.coreos.com"  # no such kinds on the fake API server
Call = tuple[str, str, str]


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
    world.apply(engine={"replicas": 2}, router={"autoscaling": {"maxReplicas": 4}})
    await world.settle()
    world.apply(engine={"replicas": 2, "shmSize": "1Gi"})
    await world.settle()
    world.programs.drained.add("demo-engine-1")
    world.apply(engine={"replicas": 1}, router={}, security={"networkPolicy": {"enabled": False}})
    await world.settle()
    world.server.remove(CLUSTERS, "team", "demo")
    await world.turn()
    return set(world.api.calls)


async def test_every_call_of_a_clusters_life_is_allowed(world: Any) -> None:
    calls = await life(world)
    assert {verb for verb, _, _ in calls} >= {"get", "list", "create", "patch", "delete"}
    assert calls - granted() == set()


async def test_rights_over_pods_secrets_and_status_are_those_that_are_used(world: Any) -> None:
    calls = await life(world)
    narrow = {
        call
        for call in granted()
        if call[2] in ("secrets", "pods/status", "pods/eviction", "cacheclusters/status")
    }
    assert narrow - calls == set()
