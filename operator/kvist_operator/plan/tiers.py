"""The agent's flags for tiers that all replicas share. Secrets are files, whose paths the renderer knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvist_operator.spec import CacheCluster
from kvist_operator.spec.base import SecretRef
from kvist_operator.spec.cache import ObjectStore, Redis


@dataclass(frozen=True)
class SecretFile:
    """A key of a Secret that a program reads as a file; `field` is where the manifest names it."""

    field: str
    ref: SecretRef


def external_secrets(cluster: CacheCluster) -> Mapping[str, SecretFile]:
    """What shared tiers outside the cluster need, by the token of the file's path."""
    remote = cluster.spec.cache.remote
    redis, store = remote.redis, remote.object_store
    found = {
        "path.redis-password": ("redis.password", redis.password if redis else None),
        "path.redis-ca": ("redis.ca", redis.ca if redis else None),
        "path.object-store-credentials": ("objectStore.credentials", store.credentials if store else None),
    }
    return {
        token: SecretFile(f"spec.cache.remote.{field}", ref)
        for token, (field, ref) in found.items()
        if ref is not None
    }


def shared_arguments(cluster: CacheCluster, *, managed: bool) -> list[str]:
    """Of Redis and object store; empty without them. `managed`: whether a managed Redis is run here."""
    cache = cluster.spec.cache
    arguments: list[str] = []
    if cache.remote.redis is not None and (managed or cache.remote.redis.managed is None):
        arguments += _redis(cache.remote.redis, cache.ttl)
    if cache.remote.object_store is not None:
        arguments += _object_store(cache.remote.object_store)
    return arguments


def _redis(redis: Redis, ttl: float | None) -> list[str]:
    # Addresses of a managed one are the renderer's; it always has a password.
    urls = "$(redis.urls)" if redis.managed is not None else ",".join(redis.urls)
    arguments = ["--redis.urls", urls]
    if redis.managed is not None or redis.password is not None:
        arguments += ["--redis.password-file", "$(path.redis-password)"]
    if redis.ca is not None:
        arguments += ["--redis.ca-file", "$(path.redis-ca)"]
    if ttl is not None:
        arguments += ["--redis.ttl", f"{ttl:g}"]
    return arguments


def _object_store(store: ObjectStore) -> list[str]:
    arguments = ["--object-store.url", store.url]
    if store.endpoint is not None:
        arguments += ["--object-store.endpoint", store.endpoint]
    if store.region is not None:
        arguments += ["--object-store.region", store.region]
    if store.credentials is not None:
        arguments += ["--object-store.credentials-file", "$(path.object-store-credentials)"]
    return arguments
