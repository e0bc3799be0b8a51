"""Everything a reconciliation decides on: one plain snapshot, taken by gather.py. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvist_operator.control.changes import ChildKey
from kvist_operator.control.pods import Pod
from kvist_operator.control.resources import AUTOSCALERS, DEPLOYMENTS, STATEFUL_SETS, Object
from kvist_operator.control.rollout import Drain, Engines
from kvist_operator.control.views import RouterView
from kvist_operator.render.kube.meta import ENGINE, ROUTER, name_of
from kvist_operator.spec import CacheCluster


@dataclass(frozen=True)
class Snapshot:
    """`raw` is the object as read, `cluster` its typed form."""

    raw: Object
    cluster: CacheCluster
    children: Mapping[ChildKey, Object]
    pods: tuple[Pod, ...]
    now: datetime.datetime
    kinds: frozenset[str] = frozenset()
    views: Mapping[str, RouterView] = field(default_factory=dict)  # by router pod
    drains: Mapping[str, Drain] = field(default_factory=dict)  # by engine pod
    missing_secrets: tuple[str, ...] = ()
    env_secrets: Mapping[str, str] = field(default_factory=dict)  # mark by component
    tiers: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict
    )  # by engine pod: problems of shared tiers
    failures: Mapping[str, str] = field(default_factory=dict)  # by StatefulSet: why it gets no pods
    token: str = field(default="", repr=False)  # of the agents, read only where they are asked

    @property
    def namespace(self) -> str:
        """Of the cluster and all its children."""
        return str(self.raw["metadata"]["namespace"])

    @property
    def name(self) -> str:
        """Of the cluster."""
        return str(self.raw["metadata"]["name"])

    def child(self, key: ChildKey) -> Object | None:
        """A child by kind and name."""
        return self.children.get(key)

    @property
    def stateful_set(self) -> Object | None:
        """The engines'."""
        return self.child((STATEFUL_SETS, name_of(self.cluster, ENGINE)))

    @property
    def deployment(self) -> Object | None:
        """The routers'."""
        return self.child((DEPLOYMENTS, name_of(self.cluster, ROUTER)))

    def of(self, component: str) -> tuple[Pod, ...]:
        """Pods of one component."""
        return tuple(pod for pod in self.pods if pod.component == component)

    @property
    def engines(self) -> Engines:
        """What rollout.py decides on."""
        found = self.stateful_set
        desired = self.cluster.spec.engine.replicas
        if found is None:
            return Engines(desired, None, False, "", self.of(ENGINE), self.drains)
        status = found.get("status") or {}
        return Engines(
            desired=desired,
            replicas=int(found["spec"].get("replicas", 1)),
            observed=observed(found),
            revision=status.get("updateRevision", ""),
            pods=self.of(ENGINE),
            drains=self.drains,
        )

    @property
    def autoscalers(self) -> tuple[Object, ...]:
        """HorizontalPodAutoscalers of the cluster."""
        return tuple(obj for (kind, _), obj in self.children.items() if kind == AUTOSCALERS)


def observed(obj: Object) -> bool:
    """Whether the object's controller has seen its latest generation."""
    return bool((obj.get("status") or {}).get("observedGeneration") == obj["metadata"].get("generation"))
