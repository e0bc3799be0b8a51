"""A cluster on the fake API server: pods as controllers would make them, programs that answer."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import replace
from typing import Any

import pytest

from kvist_operator.control.acts import Acts
from kvist_operator.control.api import Key
from kvist_operator.control.changes import digest
from kvist_operator.control.counted import CountedApi
from kvist_operator.control.errors import NoAnswer
from kvist_operator.control.gather import Gatherer
from kvist_operator.control.journal import Journal
from kvist_operator.control.parting import Parting
from kvist_operator.control.pods import Pod
from kvist_operator.control.reconcile import SECRETS_SECONDS, Outcome, Reconciler
from kvist_operator.control.resources import (
    CLUSTERS,
    DEPLOYMENTS,
    EVENTS,
    PODS,
    STATEFUL_SETS,
    Object,
    Resource,
    cluster_labels,
)
from kvist_operator.control.testing.fake_api import FakeApi
from kvist_operator.control.views import Figures, ReplicaView, RouterView
from kvist_operator.render.kube import Context, Images

NAMESPACE, NAME, MODEL = "team", "demo", "org/model"
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


class Clock:
    """Seconds that only tests move."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime.datetime:
        return START + datetime.timedelta(seconds=self.seconds)

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await asyncio.sleep(0)


class FakePrograms:
    """Routers mirror every serving engine and route to it, unless told otherwise; agents drain when told."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.silent = ""
        self.mirror = True
        self.tokens_problem = ""
        self.doubted: set[str] = set()
        self.figures = Figures()
        self.draining: set[str] = set()
        self.drained: set[str] = set()
        self.no_agent: set[str] = set()
        self.tokens: list[str] = []
        self.idle_routers: set[str] = set()
        self.feed_problem = ""
        self.redis_problems: dict[str, str] = {}
        self.cleared: list[tuple[str, str, bool]] = []  # pod, token, whether the shared tiers
        self.clear_fails: dict[str, str] = {}

    async def router(self, pod: Pod) -> RouterView:
        if self.silent:
            raise NoAnswer(self.silent)
        view = ReplicaView(True, self.mirror, models=(MODEL,), problem=self.feed_problem)
        view = replace(view, listed=pod.name not in self.idle_routers)
        replicas = {
            name: replace(view, draining=name in self.draining, doubted=name in self.doubted)
            for name, obj in self._world.pods("engine").items()
            if condition(obj, "ContainersReady") == "True"
        }
        return RouterView("", replicas, self.tokens_problem, self.figures)

    async def tiers(self, pod: Pod, token: str) -> dict[str, str]:
        if pod.name in self.no_agent:
            raise NoAnswer(f"{pod.name} is silent")
        return {"redis": self.redis_problems.get(pod.name, "")}

    async def clear(self, pod: Pod, token: str, seconds: float, *, shared: bool) -> dict[str, int]:
        if pod.name in self.no_agent:
            raise NoAnswer(f"{pod.name} is silent")
        if shared and pod.name in self.clear_fails:
            raise NoAnswer(self.clear_fails[pod.name])
        self.cleared.append((pod.name, token, shared))
        return {"redis": 7} if shared else {"memory": 3}

    async def drain(self, pod: Pod, token: str, *, undo: bool = False) -> bool:
        self.tokens.append(token)
        if pod.name in self.no_agent:
            raise NoAnswer(f"{pod.name} is silent")
        if undo:
            self.draining.discard(pod.name)
            self.drained.discard(pod.name)
            return True
        self.draining.add(pod.name)
        return pod.name in self.drained


class World:
    """The fake API server with one cluster in it, and what its controllers and kubelet would do."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.server = FakeApi()
        self.api = CountedApi(self.server)
        self.programs = FakePrograms(self)
        journal = Journal(self.api, self.clock, self.clock.now)
        gatherer = Gatherer(self.api, self.programs, self.clock.now)
        acts = Acts(self.api, self.programs, journal)
        self.context = Context("", "", Images("engine:1", "router:1", "engine:1", "redis:1"))
        parting = Parting(self.api, self.programs, gatherer, journal)
        self.reconciler = Reconciler(self.api, gatherer, acts, parting, journal, self.context, self.clock)
        self.broken_revisions: set[str] = set()
        self.started = True  # containers become ready as soon as they exist
        self.refusal = ""  # why the API server makes no pods
        self.key = Key(NAMESPACE, NAME)

    # ---- a person

    def apply(self, **spec: Any) -> Object:
        """Create the cluster, or change sections of its spec."""
        live = self.server.read(CLUSTERS, NAMESPACE, NAME)
        body = live["spec"] if live is not None else {"model": {"name": MODEL}}
        metadata = live["metadata"] if live is not None else {"name": NAME, "namespace": NAMESPACE}
        obj = {"apiVersion": CLUSTERS.api_version, "kind": CLUSTERS.kind, "metadata": dict(metadata)}
        extra = {"status": live["status"]} if live is not None and "status" in live else {}
        return self.server.put(CLUSTERS, {**obj, "spec": {**body, **spec}, **extra})

    def status(self) -> Object:
        """Of the cluster."""
        found = self.server.read(CLUSTERS, NAMESPACE, NAME)
        assert found is not None
        return dict(found.get("status") or {})

    def says(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        found = {item["type"]: item for item in self.status()["conditions"]}
        return found[kind]["status"], found[kind]["reason"]

    def events(self) -> list[str]:
        """Reasons of the events, oldest first."""
        found = [obj for obj in self.server.all(EVENTS) if obj["involvedObject"]["name"] == NAME]
        return [
            obj["reason"] for obj in sorted(found, key=lambda obj: int(obj["metadata"]["resourceVersion"]))
        ]

    def delete(self) -> None:
        """As `kubectl delete --wait=false` does."""
        self.server.ask_to_go(CLUSTERS, NAMESPACE, NAME, self.stamp())

    @property
    def exists(self) -> bool:
        """Whether the cluster is still there."""
        return self.server.read(CLUSTERS, NAMESPACE, NAME) is not None

    # ---- controllers and kubelet

    def controllers(self) -> None:
        """One pass of the StatefulSet and Deployment controllers and the kubelet."""
        for obj in self.server.all(STATEFUL_SETS):
            self._stateful_set(obj)
        for obj in self.server.all(DEPLOYMENTS):
            self._deployment(obj)

    def pods(self, component: str) -> dict[str, Object]:
        """Pods of one component by name."""
        found = self.server.all(PODS)
        return {o["metadata"]["name"]: o for o in found if o["metadata"]["labels"]["component"] == component}

    def child(self, resource: Resource, name: str) -> Object:
        """A child that must be there."""
        found = self.server.read(resource, NAMESPACE, name)
        assert found is not None
        return found

    async def turn(self) -> Outcome:
        """One reconciliation."""
        self.clock.seconds += 1
        return await self.reconciler.reconcile(self.key)

    async def settle(self, turns: int = 40) -> Outcome:
        """Turns of operator and controllers until nothing is written any more."""
        for _ in range(turns):
            before = self.api.writes()
            outcome = await self.turn()
            self.controllers()
            if self.api.writes() == before and outcome.again in (None, SECRETS_SECONDS):
                return outcome
        raise AssertionError(f"not settled: {self.status()}")

    def _stateful_set(self, obj: Object) -> None:
        name, wanted = obj["metadata"]["name"], obj["spec"]["replicas"]
        component = obj["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        revision = _revision(obj["spec"]["template"])
        live = self.pods(component)
        for ordinal in range(wanted):
            if f"{name}-{ordinal}" not in live:
                self._pod(f"{name}-{ordinal}", component, revision, obj)
        for pod in live:
            if int(pod.rsplit("-", 1)[1]) >= wanted:
                self.server.remove(PODS, NAMESPACE, pod)
        for pod in self.pods(component).values():
            self._kubelet(pod)
        pods = self.pods(component).values()
        status = {
            "observedGeneration": obj["metadata"]["generation"],
            "updateRevision": revision,
            "replicas": len(pods),
            "readyReplicas": sum(condition(pod, "Ready") == "True" for pod in pods),
        }
        self.server.put(STATEFUL_SETS, {**obj, "status": status})

    def _deployment(self, obj: Object) -> None:
        name, revision = obj["metadata"]["name"], _revision(obj["spec"]["template"])
        for at in range(obj["spec"].get("replicas", 1)):
            self._pod(f"{name}-{revision}-{at}", "router", revision, obj)
        for pod, found in self.pods("router").items():
            if revision not in pod:
                self.server.remove(PODS, NAMESPACE, pod)
            else:
                self._kubelet(found)
        ready = sum(condition(pod, "Ready") == "True" for pod in self.pods("router").values())
        count = obj["spec"].get("replicas", 1)
        status = {"replicas": count, "updatedReplicas": count, "readyReplicas": ready}
        status["observedGeneration"] = obj["metadata"]["generation"]
        if self.refusal:
            failure = {"type": "ReplicaFailure", "status": "True", "message": self.refusal}
            status["conditions"] = [failure]
        self.server.put(DEPLOYMENTS, {**obj, "status": status})

    def _pod(self, name: str, component: str, revision: str, owner: Object) -> None:
        if self.server.read(PODS, NAMESPACE, name) is not None:
            return
        if self.refusal:
            self._refuse(name, owner)
            return
        labels = {
            **cluster_labels(NAME),
            "app.kubernetes.io/component": component,
            "component": component,
            "controller-revision-hash": revision,
        }
        spec = owner["spec"]["template"]["spec"]
        self.server.put(
            PODS,
            {
                "metadata": {
                    "name": name,
                    "namespace": NAMESPACE,
                    "labels": labels,
                    "creationTimestamp": self.stamp(),
                    "ownerReferences": [{"uid": owner["metadata"]["uid"], "controller": True}],
                },
                "spec": {key: spec[key] for key in ("readinessGates", "containers") if key in spec},
                "status": {"podIP": "10.0.0.1"},
            },
        )

    def _refuse(self, name: str, owner: Object) -> None:
        event = {
            "metadata": {"name": f"{name}.refused", "namespace": NAMESPACE},
            "involvedObject": {"uid": owner["metadata"]["uid"], "name": owner["metadata"]["name"]},
            "reason": "FailedCreate",
            "message": self.refusal,
            "lastTimestamp": self.stamp(),
        }
        self.server.put(EVENTS, event)

    def _kubelet(self, pod: Object) -> None:
        revision = pod["metadata"]["labels"]["controller-revision-hash"]
        broken = revision in self.broken_revisions
        serving = self.started and not broken
        gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates", ())]
        opened = all(condition(pod, gate) == "True" for gate in gates)
        fresh = {"ContainersReady": str(serving), "Ready": str(serving and opened)}
        kept = [c for c in pod["status"].get("conditions", []) if c["type"] not in fresh]
        conditions = kept + [
            {"type": kind, "status": status, "lastTransitionTime": self._since(pod, kind, status)}
            for kind, status in fresh.items()
        ]
        waiting = {"name": "engine", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
        containers = [waiting] if broken else []
        status = {**pod["status"], "conditions": conditions, "containerStatuses": containers}
        self.server.put(PODS, {**pod, "status": status})

    def _since(self, pod: Object, kind: str, status: str) -> str:
        for item in pod["status"].get("conditions", ()):
            if (item["type"], item["status"]) == (kind, status):
                return str(item["lastTransitionTime"])
        return self.stamp()

    def stamp(self) -> str:
        """Now, as the API server writes it."""
        return self.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(pod: Object, kind: str) -> str:
    """Status of a pod's condition."""
    found = {item["type"]: item["status"] for item in pod["status"].get("conditions", ())}
    return str(found.get(kind, "False"))


def _revision(template: Object) -> str:
    return digest({"metadata": {}, "template": template})[:8]


@pytest.fixture
def world() -> World:
    """With nothing in it yet."""
    return World()
