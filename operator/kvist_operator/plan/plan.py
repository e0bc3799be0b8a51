"""CacheCluster -> Plan: which programs, with which arguments, files, ports and volumes. Pure.

Called by `kvist up` and the operator; both render the same plan.
"""

from __future__ import annotations

from typing import Final

import yaml

from kvist_connector.names import PATH_HEALTHZ, PATH_READYZ
from kvist_operator.plan.access import access_settings
from kvist_operator.plan.agent_tls import agent_tls_arguments, agent_tls_files, agent_tls_settings
from kvist_operator.plan.engine import engine_program
from kvist_operator.plan.peers import PORT, has_peers, peer_arguments
from kvist_operator.plan.program import Health, Plan, Program, Role, Volume, VolumeKind
from kvist_operator.plan.target import Target
from kvist_operator.plan.tiers import coding_arguments, shared_arguments
from kvist_operator.spec import CacheCluster

AGENT_DEADLINE: Final = 120.0
ROUTER_DEADLINE: Final = 120.0
NEIGHBOURS: Final = "neighbours"  # the port
_NEIGHBOURS: Final = {
    "neighbours": {"host": "$(host)", "port": f"$(port.{NEIGHBOURS})", "urls": ["$(neighbour.urls)"]}
}


def make_plan(cluster: CacheCluster, target: Target) -> Plan:
    """The same plan for the same input, byte for byte."""
    return Plan(
        name=cluster.name,
        replicas=cluster.spec.engine.replicas,
        agent=_agent(cluster, target) if cluster.spec.cache.enabled else None,
        engine=engine_program(cluster, target),
        router=_router(cluster, target),
    )


def _agent(cluster: CacheCluster, target: Target) -> Program:
    cache = cluster.spec.cache
    arguments = ["--replica", "$(replica)", "--socket", "$(path.socket)", "--arena", "$(path.arena)"]
    arguments += ["--memory", str(cache.memory), "--eviction", cache.eviction]
    arguments += ["--http.host", "$(host)", "--http.port", "$(port.agent)"]
    if cache.placement != "inclusive":
        arguments += ["--placement", cache.placement]
    if cache.lookup_deadline is not None:
        arguments += ["--lookup-deadline", f"{cache.lookup_deadline:g}"]
    arguments += ["--kv-events", "ipc://$(path.events)"]
    arguments += ["--kv-events-replay", "ipc://$(path.replay)"]
    volumes = [Volume(VolumeKind.ARENA, cache.memory), Volume(VolumeKind.RUN)]
    if cache.disk is not None:
        arguments += ["--disk.path", "$(path.disk)", "--disk.size", str(cache.disk.size)]
        arguments += ["--disk.fsync", cache.disk.fsync]
        if cache.disk.direct:
            arguments += ["--disk.direct", "true"]
        if cache.disk.deadline is not None:
            arguments += ["--disk.deadline", f"{cache.disk.deadline:g}"]
        volumes.append(Volume(VolumeKind.DISK, cache.disk.size, cache.disk.path))
    arguments += shared_arguments(cluster, managed=target.managed_redis)
    arguments += coding_arguments(cluster, managed=target.managed_redis)
    arguments += peer_arguments(cluster)
    arguments += agent_tls_arguments(cluster) if target.discovery == "kubernetes" else []
    return Program(
        role=Role.AGENT,
        module="kvist_connector",
        argv=tuple(arguments),
        # Not /readyz: the arena has its geometry only once the engine's worker has registered.
        health=Health("agent", PATH_HEALTHZ, AGENT_DEADLINE, _agent_tls(cluster, target)),
        ports=("agent", PORT) if has_peers(cluster) else ("agent",),
        volumes=tuple(volumes),
    )


def _agent_tls(cluster: CacheCluster, target: Target) -> bool:
    return target.discovery == "kubernetes" and bool(agent_tls_files(cluster))


def _router(cluster: CacheCluster, target: Target) -> Program:
    return Program(
        role=Role.ROUTER,
        module="kvist_router",
        argv=("--config", "$(path.config)/router.yaml"),
        env={v.name: v.value for v in cluster.spec.router.env if v.value is not None},
        files={"router.yaml": yaml.safe_dump(_router_settings(cluster, target), sort_keys=False)},
        # Ready only once it knows what the replicas hold: a request before that could be routed blindly.
        health=Health("router", PATH_READYZ, ROUTER_DEADLINE, cluster.spec.router.tls is not None),
        ports=("router", "router-admin", *((NEIGHBOURS,) if _several(cluster, target) else ())),
        volumes=(Volume(VolumeKind.MODEL),),
        after=(Role.ENGINE,),
    )


def _router_settings(cluster: CacheCluster, target: Target) -> dict[str, object]:
    router, limits = cluster.spec.router, cluster.spec.router.limits
    return {
        "host": "$(host)",
        "port": "$(port.router)",
        "admin_host": "$(host.admin)",
        "admin_port": "$(port.router-admin)",
        **({"relays": router.relays} if router.relays is not None else {}),
        "model": {"path": "$(path.model)"},
        "policy": router.policy,
        **({"shadows": list(router.shadows)} if router.shadows else {}),
        **({"weights": weights} if (weights := router.weights.model_dump(exclude_none=True)) else {}),
        **_discovery(cluster, target),
        "limits": {
            "body_bytes": limits.body,
            "in_flight": limits.concurrent_requests,
            "first_byte_seconds": limits.first_byte_deadline,
            **({"continuations": limits.continuations} if limits.continuations else {}),
            **({"queue_seconds": limits.queue_deadline} if target.discovery == "kubernetes" else {}),
        },
        **({"admission": {"per_replica": limits.requests_per_engine}} if limits.requests_per_engine else {}),
        **access_settings(cluster),
    }


def _discovery(cluster: CacheCluster, target: Target) -> dict[str, object]:
    if target.discovery == "file":
        return {"replicas_file": "$(path.replicas)"}
    return {
        "kubernetes": {"service": "$(service.engine)", "namespace": "$(namespace)"},
        **(
            {"agent": {"token_file": "$(path.token)", **agent_tls_settings(cluster)}}
            if cluster.spec.cache.enabled
            else {}
        ),
        **(_NEIGHBOURS if _several(cluster, target) else {}),
    }


def _several(cluster: CacheCluster, target: Target) -> bool:
    """Whether routers tell each other what they send. They do so even while there is one, so that another one
    restarts nobody; they know each other by the agents' token, so there are agents.
    """
    return target.discovery == "kubernetes" and cluster.spec.cache.enabled
