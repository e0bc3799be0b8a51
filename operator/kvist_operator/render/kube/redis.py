"""A managed Redis: pods among which agents spread the keys. A cache: nothing is written to a disk."""

from __future__ import annotations

from typing import Final

from kvist_connector.quantity import format_quantity
from kvist_operator.render.kube.accounts import account
from kvist_operator.render.kube.context import Context
from kvist_operator.render.kube.meta import ENGINE, REDIS, Object, labels, make, name_of, selector
from kvist_operator.render.kube.pods import container_security, pod_base, pulled, resources, secret_volume
from kvist_operator.render.kube.secrets import redis_password
from kvist_operator.render.kube.values import PORTS, container_ports, service_ports
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.cache import ManagedRedis

_FOLDER: Final = "/etc/kvist/redis"
# The password must not be in argv, which other programs of the node can read. Redis takes it from a file.
# Without one it must not start, so each step that fails ends it.
_START: Final = r"""set -eu
umask 077
test -s /etc/kvist/redis/password
escaped=$(sed 's/[\\"]/\\&/g' /etc/kvist/redis/password)
printf 'requirepass "%s"\n' "$escaped" > /tmp/redis.conf
exec redis-server /tmp/redis.conf "$@"
"""
_ALIVE: Final = 'REDISCLI_AUTH=$(cat /etc/kvist/redis/password) redis-cli -p "$0" ping | grep -q PONG'


def managed_redis(cluster: CacheCluster) -> ManagedRedis | None:
    """Its section, if one is to be run."""
    redis = cluster.spec.cache.remote.redis
    return redis.managed if cluster.spec.cache.enabled and redis is not None else None


def redis_objects(cluster: CacheCluster, context: Context) -> list[Object]:
    """StatefulSet and headless Service."""
    managed = managed_redis(cluster)
    if managed is None:
        return []
    service = make("v1", "Service", cluster, context.namespace, REDIS) | {
        "spec": {
            "clusterIP": "None",
            "selector": selector(cluster, REDIS),
            "ports": service_ports("redis"),
        }
    }
    stateful_set = make("apps/v1", "StatefulSet", cluster, context.namespace, REDIS) | {
        "spec": {
            "replicas": managed.replicas,
            "serviceName": name_of(cluster, REDIS),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": selector(cluster, REDIS)},
            "template": {
                "metadata": {"labels": labels(cluster, REDIS)},
                "spec": _pod(cluster, managed, context),
            },
        }
    }
    return [service, stateful_set]


def _pod(cluster: CacheCluster, managed: ManagedRedis, context: Context) -> Object:
    password = redis_password(cluster)
    assert password is not None  # a managed Redis always has one
    return pod_base(cluster, context, REDIS, account(cluster, ENGINE), 10) | {
        "containers": [_container(managed, context)],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            secret_volume("password", password, "password"),
        ],
    }


def _container(managed: ManagedRedis, context: Context) -> Object:
    port = str(PORTS["redis"])
    alive = {"exec": {"command": ["sh", "-c", _ALIVE, port]}, "timeoutSeconds": 5}
    # Fragmentation and buffers of connections come on top of maxmemory.
    limit = format_quantity(managed.memory + managed.memory // 4 + 64 * 1024**2)
    return {
        "name": REDIS,
        **pulled(managed.image or context.images.redis, context),
        "command": ["sh", "-c", _START, REDIS],
        "args": [
            *("--port", port, "--dir", "/tmp", "--save", "", "--appendonly", "no"),
            *("--maxmemory", str(managed.memory), "--maxmemory-policy", "allkeys-lru"),
        ],
        "securityContext": container_security(),
        "ports": container_ports("redis"),
        "resources": resources(managed.resources, {"cpu": "100m", "memory": limit}),
        "readinessProbe": {**alive, "periodSeconds": 5},
        "livenessProbe": {**alive, "periodSeconds": 10, "failureThreshold": 6},
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "password", "mountPath": _FOLDER, "readOnly": True},
        ],
    }
