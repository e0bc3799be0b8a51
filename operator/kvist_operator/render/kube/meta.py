"""Names and labels of what a CacheCluster becomes. The operator's runtime finds objects by these."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from kvist_connector.names import PORT_ROUTER
from kvist_operator.spec import CacheCluster

Object = dict[str, Any]

LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
APP: Final = "kvist"
MANAGER: Final = "kvist-operator"
ENGINE: Final = "engine"
ROUTER: Final = "router"
REDIS: Final = "redis"
CLUSTER: Final = "cluster"
# Patched by the operator alone, once per pod, after a ready router mirrors the engine.
READINESS_GATE: Final = "kvist.dev/mirrored"
CONFIG_HASH: Final = "kvist.dev/config-hash"


def name_of(cluster: CacheCluster, component: str) -> str:
    """`<cluster>-<component>`"""
    return f"{cluster.name}-{component}"


def selector(cluster: CacheCluster, component: str) -> dict[str, str]:
    """Labels that select the pods of one component."""
    return {
        LABEL_NAME: APP,
        LABEL_INSTANCE: cluster.name,
        LABEL_COMPONENT: component,
    }


def labels(cluster: CacheCluster, component: str) -> dict[str, str]:
    """Labels of every object and pod."""
    return {**selector(cluster, component), LABEL_MANAGED_BY: MANAGER}


def make(
    api_version: str, kind: str, cluster: CacheCluster, namespace: str, component: str, suffix: str = ""
) -> Object:
    """An object named `<cluster>-<component><suffix>` without its body."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name_of(cluster, component) + suffix,
            "namespace": namespace,
            "labels": labels(cluster, component),
        },
    }


def endpoint(name: str, namespace: str, *, tls: bool = False) -> str:
    """Base URL of the OpenAI API of the cluster `name`."""
    return f"http{'s' if tls else ''}://{name}-{ROUTER}.{namespace}.svc:{PORT_ROUTER}"


def digest(value: object) -> str:
    """Of plain data, equal for equal data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()
