"""Which Secrets a cluster uses. The operator makes those that are its own, and never changes one."""

from __future__ import annotations

from dataclasses import dataclass

from kvist_operator.plan.access import has_keys
from kvist_operator.render.kube.meta import CLUSTER, REDIS, ROUTER, labels, name_of
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.base import SecretRef


@dataclass(frozen=True)
class GeneratedSecret:
    """A Secret to be created with a random text under `key` when it does not exist."""

    name: str
    key: str
    labels: dict[str, str]


def control_token(cluster: CacheCluster) -> SecretRef:
    """The token of agents' HTTP APIs, the feed included: the user's, or the one that the operator makes."""
    return cluster.spec.security.token or own_token(cluster.name)


def own_token(name: str) -> SecretRef:
    """The one that the operator makes for the cluster `name`."""
    return SecretRef.model_validate({"name": f"{name}-token"})


def redis_password(cluster: CacheCluster) -> SecretRef | None:
    """The password of the Redis tier; a managed Redis always has one."""
    redis = cluster.spec.cache.remote.redis
    if redis is None or redis.password is not None:
        return redis.password if redis is not None else None
    if redis.managed is None:
        return None
    return SecretRef.model_validate({"name": name_of(cluster, REDIS), "key": "password"})


def tenants_secret(name: str) -> SecretRef:
    """What the salts of the cluster's tenants are made with: its routers must agree on it."""
    return SecretRef.model_validate({"name": f"{name}-tenants", "key": "secret"})


def generated_secrets(cluster: CacheCluster) -> tuple[GeneratedSecret, ...]:
    """Those that the user did not name. A render cannot hold them, since they are random."""
    found = []
    if cluster.spec.cache.enabled and cluster.spec.security.token is None:
        token = control_token(cluster)
        found.append(GeneratedSecret(token.name, token.key, labels(cluster, CLUSTER)))
    redis = cluster.spec.cache.remote.redis
    if cluster.spec.cache.enabled and redis is not None and redis.managed and redis.password is None:
        password = redis_password(cluster)
        assert password is not None
        found.append(GeneratedSecret(password.name, password.key, labels(cluster, REDIS)))
    if has_keys(cluster):
        secret = tenants_secret(cluster.name)
        found.append(GeneratedSecret(secret.name, secret.key, labels(cluster, ROUTER)))
    return tuple(found)
