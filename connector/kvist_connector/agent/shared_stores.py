"""The stores of tiers that agents share, from the settings: Redis in its forms, object stores.

Called by `stores`. The libraries are imported where they are used: half a second that agents
without such a tier need not spend.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvist_connector.agent.redis_settings import RedisSettings
from kvist_connector.agent.server_settings import guarded
from kvist_connector.agent.settings import ObjectStoreSettings
from kvist_connector.errors import ConfigError
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.spread import SpreadStore

if TYPE_CHECKING:
    from kvist_connector.tiers.redis_server import RedisServer


def open_redis(settings: RedisSettings) -> ChunkStore:
    """One or several servers, each behind a breaker of its own; raises ConfigError."""
    from kvist_connector.tiers.redis import RedisStore
    from kvist_connector.tiers.redis_cluster import ClusterStore

    for name in ("password_file", "sentinel_password_file", "ca_file"):
        _readable(f"redis.{name}", getattr(settings, name))

    def opened(server: RedisServer) -> ChunkStore:
        return guarded(RedisStore(server), settings)

    servers = _redis_servers(settings)
    if settings.cluster:
        return ClusterStore(servers, opened, settings.lookup_deadline / 2)
    return SpreadStore({server.label: opened(server) for server in servers})


def _redis_servers(settings: RedisSettings) -> list[RedisServer]:
    from kvist_connector.tiers.redis_server import RedisServer, Sentinels

    server = RedisServer(
        settings.urls[0],
        password_file=settings.password_file,
        ca_file=settings.ca_file,
        ttl=settings.ttl,
        connect_timeout=settings.deadline,
        # Questions, deletions and lists need connections beside those that move bytes.
        connections=settings.concurrency + 4,
        cluster=settings.cluster,
    )
    if settings.sentinel is not None:
        sentinels = Sentinels(settings.urls, settings.sentinel, settings.sentinel_password_file)
        return [replace(server, sentinels=sentinels)]
    servers = [replace(server, url=url) for url in settings.urls]
    labels = [each.label for each in servers]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"redis.urls: {label} is named twice: remove one")
    return servers


def open_object_store(settings: ObjectStoreSettings, url: str, threads: Executor) -> ChunkStore:
    """An object store behind a breaker; raises ConfigError."""
    from obstore.store import LocalStore

    from kvist_connector.tiers.folder_store import FolderStore
    from kvist_connector.tiers.object_backend import Bucket, open_backend
    from kvist_connector.tiers.object_store import ObjectStore

    bucket = Bucket(
        url,
        endpoint=settings.endpoint,
        region=settings.region,
        credentials_file=settings.credentials_file,
        timeout=settings.deadline,
        connect_timeout=min(5.0, settings.deadline),
    )
    _readable("object_store.credentials_file", settings.credentials_file)
    backend = open_backend(bucket)
    if isinstance(backend, LocalStore):
        return guarded(FolderStore(backend, url, threads), settings)
    return guarded(ObjectStore(backend, url, threads), settings)


def _readable(name: str, path: Path | None) -> None:
    if path is None:
        return
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from error
