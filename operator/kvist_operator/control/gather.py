"""Takes the snapshot of one cluster: reads the API server, asks routers and draining agents.

Called by reconcile.py. Nothing here decides or changes anything but the drains it asks about, which were
begun before (a drain is asked about by asking for it again).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvist_operator.control.api import Api
from kvist_operator.control.ask import Programs
from kvist_operator.control.changes import ChildKey
from kvist_operator.control.errors import NoAnswer, NotFound
from kvist_operator.control.pods import Pod, parse_time, pod_of
from kvist_operator.control.resources import (
    OPTIONAL_GROUP,
    OPTIONAL_KINDS,
    PODS,
    SECRETS,
    Object,
    cluster_labels,
    managed,
)
from kvist_operator.control.rollout import Drain
from kvist_operator.control.secret_values import read_secrets
from kvist_operator.control.snapshot import Snapshot
from kvist_operator.control.uncreated import creation_failures
from kvist_operator.control.views import RouterView
from kvist_operator.render.kube import control_token
from kvist_operator.render.kube.meta import ENGINE, LABEL_COMPONENT, ROUTER
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.base import SecretRef

DRAINING: Final = "kvist.dev/draining"


class Gatherer:
    """`now` is wall-clock time, for comparison with timestamps of the API server."""

    def __init__(self, api: Api, programs: Programs, now: Callable[[], datetime.datetime]) -> None:
        self._api = api
        self._programs = programs
        self.now = now
        self._kinds: frozenset[str] | None = None

    async def snapshot(self, raw: Object, cluster: CacheCluster) -> Snapshot:
        """Of one cluster; raises ApiError when the API server does not answer."""
        namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
        kinds = self._kinds if self._kinds is not None else await self.ask_kinds()
        labels = cluster_labels(name)
        reads = [self._api.list(resource, namespace, labels) for resource in managed(kinds)]
        try:
            *lists, listed_pods = await asyncio.gather(*reads, self._api.list(PODS, namespace, labels))
        except NotFound:
            self._kinds = None  # an optional kind was removed; the next turn asks which are left
            raise
        children: dict[ChildKey, Object] = {
            (resource, obj["metadata"]["name"]): obj
            for resource, found in zip(managed(kinds), lists, strict=True)
            for obj in found
        }
        now = self.now()
        pods = tuple(pod_of(obj, _component(obj), now) for obj in listed_pods)
        begun = {obj["metadata"]["name"]: at for obj in listed_pods if (at := drain_begun(obj)) is not None}
        found = await read_secrets(self._api, raw, cluster)
        token = ""
        if begun or shared_tiers(cluster):
            token = await self.token(namespace, control_token(cluster))
        return Snapshot(
            raw=raw,
            cluster=cluster,
            children=children,
            pods=pods,
            now=now,
            kinds=kinds,
            views=await self.views(pods),
            drains=await self._drains(cluster, pods, begun, now, token),
            missing_secrets=found.missing,
            env_secrets=found.env,
            tiers=await ask_tiers(self._programs, cluster, pods, token),
            failures=await creation_failures(self._api, namespace, children.values(), listed_pods),
            token=token,
        )

    async def pods(self, namespace: str, name: str) -> tuple[Pod, ...]:
        """Pods of one cluster."""
        found, now = await self._api.list(PODS, namespace, cluster_labels(name)), self.now()
        return tuple(pod_of(obj, _component(obj), now) for obj in found)

    async def ask_kinds(self) -> frozenset[str]:
        """Optional kinds that this API server has now. The sweep asks; snapshots go by its last answer."""
        self._kinds = await self._api.kinds(OPTIONAL_GROUP) & OPTIONAL_KINDS
        return self._kinds

    async def token(self, namespace: str, reference: SecretRef) -> str:
        """A value in a Secret as text; empty when it is not there."""
        secret = await self._api.get(SECRETS, namespace, reference.name)
        value = ((secret or {}).get("data") or {}).get(reference.key, "")
        try:
            return base64.b64decode(value, validate=True).decode().strip()
        except (binascii.Error, UnicodeDecodeError):
            return ""

    async def views(self, pods: Iterable[Pod]) -> dict[str, RouterView]:
        """What each router says."""
        asked = [pod for pod in pods if pod.component == ROUTER and pod.address and not pod.terminating]
        answers = await asyncio.gather(*(ask_router(self._programs, pod) for pod in asked))
        return {pod.name: view for pod, view in zip(asked, answers, strict=True)}

    async def _drains(
        self,
        cluster: CacheCluster,
        pods: Iterable[Pod],
        begun: Mapping[str, datetime.datetime],
        now: datetime.datetime,
        token: str,
    ) -> dict[str, Drain]:
        limit = cluster.spec.engine.drain_deadline
        found = {}
        for pod in pods:
            if pod.name in begun and not pod.terminating:
                late = (now - begun[pod.name]).total_seconds() > limit
                found[pod.name] = Drain.DONE if late else await self._drain(pod, token)
        return found

    async def _drain(self, pod: Pod, token: str) -> Drain:
        try:
            return Drain.DONE if await self._programs.drain(pod, token) else Drain.RUNNING
        except NoAnswer:
            return Drain.RUNNING  # asked again until its deadline


def shared_tiers(cluster: CacheCluster) -> bool:
    """Whether there are tiers whose state only the agents know."""
    remote = cluster.spec.cache.remote
    return cluster.spec.cache.enabled and (remote.redis is not None or remote.object_store is not None)


async def ask_router(programs: Programs, pod: Pod) -> RouterView:
    """What one router says, its silence included."""
    try:
        return await programs.router(pod)
    except NoAnswer as error:
        return RouterView(silent=str(error))


async def ask_tiers(
    programs: Programs, cluster: CacheCluster, pods: Iterable[Pod], token: str
) -> dict[str, dict[str, str]]:
    """What the agents of serving engines say of shared tiers; those that do not answer are left out."""
    asked = [pod for pod in pods if pod.component == ENGINE and pod.serving and not pod.terminating]
    if not shared_tiers(cluster):
        return {}
    answers = await asyncio.gather(*(_tiers(programs, pod, token) for pod in asked))
    return {pod.name: found for pod, found in zip(asked, answers, strict=True) if found is not None}


async def _tiers(programs: Programs, pod: Pod, token: str) -> dict[str, str] | None:
    try:
        return await programs.tiers(pod, token)
    except NoAnswer:
        return None


def drain_begun(obj: Object) -> datetime.datetime | None:
    """When the operator began to drain this pod; a condition of the pod remembers it."""
    for item in (obj.get("status") or {}).get("conditions") or ():
        if item["type"] == DRAINING and item["status"] == "True":
            return parse_time(item["lastTransitionTime"])
    return None


def _component(obj: Object) -> str:
    return str((obj["metadata"].get("labels") or {}).get(LABEL_COMPONENT, ENGINE))
