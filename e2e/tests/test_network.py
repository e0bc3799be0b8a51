"""A cluster's NetworkPolicies as rendered, under a real firewall: the table's edges pass and no others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from kvist_operator import spec
from kvist_operator.plan import make_plan
from kvist_operator.plan.target import kube_target
from kvist_operator.render.kube import MANAGER, Context, Images, render
from kvist_operator.render.kube.meta import ENGINE, LABEL_NAME, REDIS, ROUTER, selector
from kvist_operator.render.kube.network import EDGES
from kvist_operator.render.kube.values import PORTS
from kvist_operator.spec import CacheCluster
from testbed.kube import Kubectl
from testbed.small_pods import apply, connects, listener, ready
from testbed.tenancy import tenant
from testbed.waiting import LONG_PAUSE, until

pytestmark = [pytest.mark.e2e_pod, pytest.mark.usefixtures("node")]
PARTS = (ENGINE, ROUTER, REDIS)


@dataclass(frozen=True)
class Place:
    """A pod; `role` is what the table calls it: a component of the cluster, or nobody it knows."""

    role: str
    namespace: str
    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Town:
    """All pods, each of which listens on every port of the table."""

    kubectl: Kubectl
    places: tuple[Place, ...]
    addresses: dict[str, str]

    def edges(self, source: Place) -> set[tuple[str, str]]:
        """Name of the pod and of the port, for everything that a pod can connect to."""
        all_of_them = {
            f"{self.addresses[place.name]}:{number}": (place.name, port)
            for place in self.places
            if place != source
            for port, number in PORTS.items()
        }
        found = connects(self.kubectl, source.namespace, source.name, all_of_them)
        return {all_of_them[place] for place in found}

    def wanted(self, source: Place, *, egress: bool) -> set[tuple[str, str]]:
        """What the table says, and everything to and between pods that no policy is for."""
        return {
            (place.name, port)
            for place in self.places
            if place != source
            for port in PORTS
            if _admitted(source.role, place.role, port)
            and not (egress and _kept(source.role, place.role, port))
        }

    def differences(self, *, egress: bool = False) -> dict[str, set[tuple[str, str]]]:
        """By source: edges that pass and should not, and those that should and do not."""
        # What is refused is waited for: all pods try at the same time.
        with ThreadPoolExecutor(len(self.places)) as threads:
            tried = zip(self.places, threads.map(self.edges, self.places), strict=True)
            found = {place.name: edges ^ self.wanted(place, egress=egress) for place, edges in tried}
        return {name: edges for name, edges in found.items() if edges}


def _admitted(source: str, target: str, port: str) -> bool:
    """Whether the target accepts it."""
    edges = [edge for edge in EDGES if (edge.to, edge.port) == (target, port)]
    return target not in PARTS or any(source in edge.sources or "clients" in edge.sources for edge in edges)


def _kept(source: str, target: str, port: str) -> bool:
    """Whether the source may not begin it once egress is limited too."""
    edges = [edge for edge in EDGES if (edge.to, edge.port) == (target, port)]
    return source in PARTS and not any(source in edge.sources for edge in edges)


def cluster(name: str, *, egress: bool = False) -> CacheCluster:
    """With all parts there are."""
    body = {
        "model": {"name": "owner/model"},
        "engine": {"replicas": 2},
        "cache": {"memory": "2Gi", "peers": {"enabled": True}, "remote": {"redis": {"managed": {}}}},
        "security": {"networkPolicy": {"egress": egress}},
    }
    metadata = {"name": name}
    return spec.parse(
        {"apiVersion": "kvist.dev/v1alpha1", "kind": "CacheCluster", "metadata": metadata, "spec": body}
    )


def policies(namespace: str, system: str, *, egress: bool = False) -> list[dict[str, Any]]:
    """The rendered ones, for an operator in the namespace `system`."""
    found = cluster("demo", egress=egress)
    context = Context(namespace, "0", Images("a:1", "b:1", "a:1", "c:1"), operator_namespace=system)
    objects = render(found, make_plan(found, kube_target(found)), context)
    mine = [item for item in objects if item["kind"] == "NetworkPolicy"]
    assert len(mine) == len(PARTS)
    return mine


@pytest.fixture
def system(kubectl: Kubectl) -> Iterator[str]:
    """Another namespace: the operator's."""
    with tenant(kubectl) as name:
        yield name


@pytest.fixture
def town(kubectl: Kubectl, namespace: str, system: str) -> Town:
    demo, other = cluster("demo"), cluster("other")
    places = (
        *(Place(part, namespace, part, selector(demo, part)) for part in PARTS),
        Place(ENGINE, namespace, "engine-1", selector(demo, ENGINE)),
        Place("nobody", namespace, "other-engine", selector(other, ENGINE)),
        Place("nobody", namespace, "impostor", {LABEL_NAME: MANAGER}),
        Place("nobody", namespace, "stranger", {"app": "stranger"}),
        Place("nobody", system, "foreign-router", selector(demo, ROUTER)),
        Place("operator", system, "operator", {LABEL_NAME: MANAGER}),
        Place("metrics", system, "prometheus", {LABEL_NAME: "prometheus"}),
    )
    for where in (namespace, system):
        mine = [place for place in places if place.namespace == where]
        apply(kubectl, where, *(listener(place.name, place.labels, PORTS.values()) for place in mine))
    for where in (namespace, system):
        ready(kubectl, where, *(place.name for place in places if place.namespace == where))
    addresses = {
        item["metadata"]["name"]: item["status"]["podIP"]
        for where in (namespace, system)
        for item in kubectl.get("pods", f"--namespace={where}")["items"]
    }
    return Town(kubectl, places, addresses)


def test_edges_of_the_table_pass_and_all_others_are_refused(
    kubectl: Kubectl, namespace: str, system: str, town: Town
) -> None:
    stranger = next(place for place in town.places if place.name == "stranger")
    assert len(town.edges(stranger)) == len(PORTS) * (len(town.places) - 1)  # all of them listen
    for egress in (False, True):
        apply(kubectl, namespace, *policies(namespace, system, egress=egress))
        # The firewall follows within seconds.
        until(
            f"the edges of the table, egress limited: {egress}",
            lambda egress=egress: not town.differences(egress=egress),
            90,
            lambda egress=egress: str(town.differences(egress=egress)),
            LONG_PAUSE,
        )
    resolve = "import socket; print(socket.getaddrinfo('kubernetes.default.svc', 443)[0][4][0])"
    command = ("exec", "engine", f"--namespace={namespace}", "--", "/usr/bin/python3", "-c", resolve)
    assert kubectl(*command).strip() == kubectl.bed.api_service
