"""The agent's flags for tiers that all replicas share, and for how chunks are stored in lower tiers.

Secrets are files, whose paths the renderer knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvist_operator.spec import CacheCluster
from kvist_operator.spec.base import SecretRef
from kvist_operator.spec.cache import ObjectStore, Redis
from kvist_operator.spec.tier_calls import TierCalls


@dataclass(frozen=True)
class SecretFile:
    """A key of a Secret that a program reads as a file; `field` is where the manifest names it."""

    field: str
    ref: SecretRef


def external_secrets(cluster: CacheCluster) -> Mapping[str, SecretFile]:
    """What the agent needs of the user for its lower tiers, by the token of the file's path."""
    cache = cluster.spec.cache
    redis, store = cache.remote.redis, cache.remote.object_store
    sentinel = redis.sentinel if redis else None
    found = {
        "path.redis-password": ("remote.redis.password", redis.password if redis else None),
        "path.redis-sentinel-password": (
            "remote.redis.sentinel.password",
            sentinel.password if sentinel else None,
        ),
        "path.redis-ca": ("remote.redis.ca", redis.ca if redis else None),
        "path.object-store-credentials": (
            "remote.objectStore.credentials",
            store.credentials if store else None,
        ),
        "path.encryption-keys": ("encryption.keys", cache.encryption.keys),
    }
    return {
        token: SecretFile(f"spec.cache.{field}", ref)
        for token, (field, ref) in found.items()
        if ref is not None
    }


def coding_arguments(cluster: CacheCluster, *, managed: bool) -> list[str]:
    """How chunks are stored in the lower tiers that there are; `managed` as for `shared_arguments`."""
    cache = cluster.spec.cache
    chosen = cache.compression
    tiers = {
        "disk": (cache.disk, chosen.disk),
        "redis": (_redis_here(cluster, managed), chosen.redis),
        "object-store": (cache.remote.object_store, chosen.object_store),
    }
    arguments = []
    for name, (tier, own) in tiers.items():
        codec = own or chosen.codec
        if tier is not None and codec != "none":
            arguments += [f"--{name}.compression", codec]
    if cache.encryption.keys is not None:
        arguments += ["--encryption.keys-file", "$(path.encryption-keys)"]
    return arguments


def shared_arguments(cluster: CacheCluster, *, managed: bool) -> list[str]:
    """Of Redis and object store; empty without them. `managed`: whether a managed Redis is run here."""
    cache = cluster.spec.cache
    arguments: list[str] = []
    if (redis := _redis_here(cluster, managed)) is not None:
        arguments += _redis(redis, cache.ttl)
    if cache.remote.object_store is not None:
        arguments += _object_store(cache.remote.object_store)
    return arguments


def _redis_here(cluster: CacheCluster, managed: bool) -> Redis | None:
    redis = cluster.spec.cache.remote.redis
    return redis if redis is not None and (managed or redis.managed is None) else None


def _redis(redis: Redis, ttl: float | None) -> list[str]:
    # Addresses of a managed one are the renderer's; it always has a password.
    urls = "$(redis.urls)" if redis.managed is not None else ",".join(redis.urls)
    arguments = ["--redis.urls", urls]
    if redis.managed is not None or redis.password is not None:
        arguments += ["--redis.password-file", "$(path.redis-password)"]
    if redis.cluster:
        arguments += ["--redis.cluster", "true"]
    if redis.sentinel is not None:
        arguments += ["--redis.sentinel", redis.sentinel.primary]
        if redis.sentinel.password is not None:
            arguments += ["--redis.sentinel-password-file", "$(path.redis-sentinel-password)"]
    if redis.ca is not None:
        arguments += ["--redis.ca-file", "$(path.redis-ca)"]
    if ttl is not None:
        arguments += ["--redis.ttl", f"{ttl:g}"]
    return arguments + _calls("redis", redis)


def _object_store(store: ObjectStore) -> list[str]:
    arguments = ["--object-store.url", store.url]
    if store.endpoint is not None:
        arguments += ["--object-store.endpoint", store.endpoint]
    if store.region is not None:
        arguments += ["--object-store.region", store.region]
    if store.credentials is not None:
        arguments += ["--object-store.credentials-file", "$(path.object-store-credentials)"]
    return arguments + _calls("object-store", store)


def _calls(name: str, tier: TierCalls) -> list[str]:
    given = {
        "lookup-deadline": tier.lookup_deadline,
        "deadline": tier.deadline,
        "pause": tier.pause,
        "concurrency": tier.concurrency,
    }
    arguments = []
    for setting, value in given.items():
        if value is not None:
            arguments += [f"--{name}.{setting}", f"{value:g}"]
    return arguments
