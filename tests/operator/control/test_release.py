"""`python -m kvist_operator release`: clusters wait for no operator after it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvist_connector.errors import ConfigError
from kvist_operator.control.farewell import FINALIZER
from kvist_operator.control.lease import Elector, LeaseTerms
from kvist_operator.control.resources import CLUSTERS, DEPLOYMENTS, LEASES, Object, Resource
from kvist_operator.control.testing.fake_api import FakeApi
from kvist_operator.release import release

HOME = "kvist-system"
OPERATOR = (HOME, "kvist")


def cluster(namespace: str, *finalizers: str) -> Object:
    metadata = {"name": "demo", "namespace": namespace, "finalizers": list(finalizers)}
    return {"apiVersion": CLUSTERS.api_version, "kind": CLUSTERS.kind, "metadata": metadata, "spec": {}}


def lease(holder: str) -> Object:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15}
    return {"metadata": {"name": "kvist", "namespace": HOME}, "spec": spec}


class Clock:
    """Seconds that pass in sleep only."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await asyncio.sleep(0)


def elector(server: FakeApi, clock: Clock | None = None) -> Elector:
    clock = clock or Clock()
    return Elector(server, LeaseTerms(HOME, "kvist", "release"), clock=clock, sleep=clock.sleep)


def left(server: FakeApi, namespace: str) -> list[str]:
    found = server.read(CLUSTERS, namespace, "demo")
    assert found is not None
    return list(found["metadata"].get("finalizers") or ())


async def test_our_finalizer_goes_from_every_cluster_and_those_of_others_stay() -> None:
    server = FakeApi()
    server.put(CLUSTERS, cluster("a", FINALIZER))
    server.put(CLUSTERS, cluster("b", "example.com/other", FINALIZER))
    server.put(CLUSTERS, cluster("c"))
    assert await release(server, elector(server), (None,), None, 10) == 2
    assert (left(server, "a"), left(server, "b")) == ([], ["example.com/other"])
    held = server.read(LEASES, HOME, "kvist")
    assert held is not None
    assert held["spec"]["holderIdentity"] == ""


async def test_only_the_served_namespaces_are_touched() -> None:
    server = FakeApi()
    server.put(CLUSTERS, cluster("a", FINALIZER))
    server.put(CLUSTERS, cluster("b", FINALIZER))
    assert await release(server, elector(server), ("a",), None, 10) == 1
    assert left(server, "b") == [FINALIZER]


async def test_the_operator_ends_first_and_a_cluster_under_deletion_is_gone() -> None:
    server, order = FakeApi(), []
    server.put(LEASES, lease("kvist-0"))
    server.put(DEPLOYMENTS, {"metadata": {"name": "kvist", "namespace": HOME}, "spec": {"replicas": 2}})
    server.put(CLUSTERS, cluster("a", FINALIZER))
    server.ask_to_go(CLUSTERS, "a", "demo")

    def written(verb: str, resource: Resource, obj: Object) -> None:
        order.append(resource)
        if resource == DEPLOYMENTS:
            server.put(LEASES, lease(""))  # what the ending operator does

    server.on_write = written
    assert await release(server, elector(server), (None,), OPERATOR, 10) == 1
    assert server.read(CLUSTERS, "a", "demo") is None
    assert order.index(DEPLOYMENTS) < order.index(LEASES) < order.index(CLUSTERS)


async def test_a_killed_operators_lease_runs_out_first() -> None:
    server, clock = FakeApi(), Clock()
    server.put(LEASES, lease("kvist-0"))
    server.put(CLUSTERS, cluster("a", FINALIZER))
    assert await release(server, elector(server, clock), (None,), None, 10) == 1
    assert 15 <= clock.seconds < 20


async def test_where_no_lease_can_be_made_no_operator_acts_either() -> None:
    server, clock = FakeApi(), Clock()
    server.put(CLUSTERS, cluster("a", FINALIZER))
    server.reject = lambda obj: "the namespace is being terminated" if obj["kind"] == LEASES.kind else None
    assert await release(server, elector(server, clock), (None,), None, 10) == 1
    assert 15 <= clock.seconds < 20  # one whose Lease went may act so long


async def test_nothing_is_done_while_an_operator_acts() -> None:
    server = FakeApi()
    server.put(LEASES, lease("kvist-0"))
    server.put(CLUSTERS, cluster("a", FINALIZER))
    renewing = Clock()

    async def renewed(seconds: float) -> None:
        server.put(
            LEASES,
            {
                **lease("kvist-0"),
                "metadata": {"name": "kvist", "namespace": HOME, "labels": {"turn": str(renewing())}},
            },
        )
        await renewing.sleep(seconds)

    busy = Elector(server, LeaseTerms(HOME, "kvist", "release"), clock=renewing, sleep=renewed)
    with pytest.raises(ConfigError, match="scale its Deployment to 0"):
        await release(server, busy, (None,), None, 0.05)
    assert left(server, "a") == [FINALIZER]


async def test_a_cluster_that_changes_meanwhile_is_tried_again() -> None:
    server, changes = FakeApi(), [1, 2]
    server.put(CLUSTERS, cluster("a", FINALIZER))

    class Racing:
        """Somebody writes the cluster between our read and our write."""

        def __getattr__(self, name: str) -> Any:
            return getattr(server, name)

        async def patch(self, resource: Resource, *rest: Any, **more: Any) -> Object:
            if resource == CLUSTERS and changes:
                server.put(CLUSTERS, {**cluster("a", FINALIZER), "spec": {"change": changes.pop()}})
            return await server.patch(resource, *rest, **more)

    assert await release(Racing(), elector(server), (None,), None, 10) == 1
    assert left(server, "a") == []
