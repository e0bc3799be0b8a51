"""The engines: a StatefulSet of pods with engine and agent, and the headless Service that routers watch."""

from __future__ import annotations

import math
from typing import Final

from kvist_operator.plan import Plan, Program, fill
from kvist_operator.render.kube.accounts import account
from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import ENGINE, READINESS_GATE, Object, labels, make, name_of, selector
from kvist_operator.render.kube.pods import (
    RUN,
    WRITABLE,
    environment,
    http_probe,
    memory_volume,
    model_volume,
    pod_base,
    program,
    resources,
    scratch_volumes,
)
from kvist_operator.render.kube.tiers import agent_container, agent_volumes, disk_claims
from kvist_operator.render.kube.values import SOCKET, container_ports, service_ports, values
from kvist_operator.render.merge import overlay
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.amounts import gpu_resource

# After the drain, for the engine to end and the agent to write its journal.
_ENDING: Final = 30
_STARTUP_PERIOD: Final = 5


def engine_objects(cluster: CacheCluster, plan: Plan, context: Context) -> list[Object]:
    """StatefulSet and Service."""
    return [_stateful_set(cluster, plan, context), _service(cluster, plan, context)]


def _service(cluster: CacheCluster, plan: Plan, context: Context) -> Object:
    ports = ("engine", "agent") if plan.agent is not None else ("engine",)
    return make("v1", "Service", cluster, context.namespace, ENGINE) | {
        "spec": {
            "clusterIP": "None",
            # Routers mirror an engine before it is ready: the readiness gate waits for them.
            "publishNotReadyAddresses": True,
            "selector": selector(cluster, ENGINE),
            "ports": service_ports(*ports),
        }
    }


def _stateful_set(cluster: CacheCluster, plan: Plan, context: Context) -> Object:
    replicas = context.engine_replicas if context.engine_replicas is not None else plan.replicas
    claims = disk_claims(cluster) if plan.agent is not None else {}
    template = {
        "metadata": {
            "labels": labels(cluster, ENGINE),
            "annotations": {"kubectl.kubernetes.io/default-container": ENGINE},
        },
        "spec": _pod(cluster, plan, context),
    }
    return make("apps/v1", "StatefulSet", cluster, context.namespace, ENGINE) | {
        "spec": {
            "replicas": replicas,
            "serviceName": name_of(cluster, ENGINE),
            "podManagementPolicy": "Parallel",
            # The operator replaces pods itself, one at a time, each drained before it goes.
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": selector(cluster, ENGINE)},
            "template": overlay(template, cluster.spec.engine.pod_template, "spec.engine.podTemplate"),
            **claims,
        }
    }


def _pod(cluster: CacheCluster, plan: Plan, context: Context) -> Object:
    engine = cluster.spec.engine
    grace = math.ceil(engine.drain_deadline) + _ENDING
    pod = pod_base(cluster, context, ENGINE, account(cluster, ENGINE), grace)
    volumes = [memory_volume("shm", engine.shm_size), *scratch_volumes()[0], *model_volume(cluster)[0]]
    if plan.agent is not None:
        pod["readinessGates"] = [{"conditionType": READINESS_GATE}]
        pod["initContainers"] = [agent_container(cluster, plan.agent, context)]
        volumes += agent_volumes(cluster, plan.agent)
    pod["containers"] = [_container(cluster, plan.engine, context, plan.agent is not None)]
    pod["volumes"] = volumes
    return pod


def _container(cluster: CacheCluster, engine: Program, context: Context, cached: bool) -> Object:
    spec = cluster.spec.engine
    filled = values(cluster, context)
    image = spec.image or context.images.engine
    health, port = engine.health.path, engine.health.port
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, *scratch_volumes()[1], *model_volume(cluster)[1]]
    if cached:
        mounts.append({"name": "kvist", "mountPath": RUN})
    env = {**WRITABLE, **{key: fill(text, filled) for key, text in engine.env.items()}}
    return {
        **program(ENGINE, image, engine.module, (fill(a, filled) for a in engine.argv), context),
        "env": environment(env, spec.env),
        "ports": container_ports(*engine.ports),
        "resources": _resources(cluster, engine),
        # Loading is the startup probe's: until it passes the others do not run, so slow is not dead.
        "startupProbe": http_probe(
            health, port, _STARTUP_PERIOD, math.ceil(engine.health.deadline / _STARTUP_PERIOD)
        ),
        "livenessProbe": http_probe(health, port, 10, 6),
        "readinessProbe": http_probe(health, port, 5, 3),
        "lifecycle": {"preStop": _pre_stop(spec.drain_deadline, cached)},
        "volumeMounts": mounts,
    }


def _pre_stop(deadline: float, cached: bool) -> Object:
    if not cached:
        return {"sleep": {"seconds": min(5, math.ceil(deadline))}}  # until routers know that it ends
    command = ["python3", "-m", "kvist_connector", "drain", "--socket", SOCKET]
    return {"exec": {"command": [*command, "--deadline", str(math.ceil(deadline))]}}


def _resources(cluster: CacheCluster, engine: Program) -> Object:
    given = cluster.spec.engine.resources
    found = resources(given)
    if engine.devices and gpu_resource({**given.requests, **given.limits}) is None:
        found.setdefault("limits", {})["nvidia.com/gpu"] = str(engine.devices)
    return found
