"""The agent's flags for tiers that all replicas share. Secrets are files, whose paths the renderer knows."""

from __future__ import annotations

from kvist_operator.spec import CacheCluster
from kvist_operator.spec.cache import ObjectStore, Redis


def shared_arguments(cluster: CacheCluster) -> list[str]:
    """Of Redis and object store; empty without them."""
    cache = cluster.spec.cache
    arguments: list[str] = []
    if cache.remote.redis is not None:
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
