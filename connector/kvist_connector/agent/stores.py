"""The stores of the lower tiers from the settings, in order of preference, with their wrappers.

A shared store that does not answer now is no reason not to start: the breaker and the tier say
so and go on. What is wrong in the settings themselves is a ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from kvist_connector.agent.settings import AgentSettings, ObjectStoreSettings, RedisSettings
from kvist_connector.errors import ConfigError
from kvist_connector.protocol.tiers import Tier
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.coding import Coding, Compression
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import EnvelopeStore
from kvist_connector.tiers.metered import Meter, MeteredStore
from kvist_connector.tiers.spread import SpreadStore

if TYPE_CHECKING:
    from kvist_connector.tiers.encryption import Keyring

_FAILURES = 3


async def open_stores(
    settings: AgentSettings, threads: Executor, meter: Callable[[Tier], Meter]
) -> dict[Tier, EnvelopeStore]:
    """Every configured tier below memory; raises ConfigError."""
    found: dict[Tier, ChunkStore] = {}
    keys = _keys(settings.encryption.keys_file)
    # Without I/O first: a mistake in them leaves no folder locked.
    if settings.redis.urls:
        found[Tier.REDIS] = _redis(settings.redis)
    if settings.object_store.url is not None:
        found[Tier.OBJECT] = _object_store(settings.object_store, settings.object_store.url, threads)
    disk = settings.disk
    if disk.path is not None:
        found[Tier.DISK] = await DiskStore.open(disk.path, disk.size, disk.fsync, threads)
    compression: dict[Tier, Compression] = {
        Tier.DISK: disk.compression,
        Tier.REDIS: settings.redis.compression,
        Tier.OBJECT: settings.object_store.compression,
    }
    return {
        tier: EnvelopeStore(MeteredStore(found[tier], meter(tier)), threads, Coding(compression[tier], keys))
        for tier in sorted(found)
    }


def _keys(path: Path | None) -> Keyring | None:
    if path is None:
        return None
    from kvist_connector.tiers.encryption import read_keys

    return read_keys(path, "encryption.keys_file")


def _redis(settings: RedisSettings) -> ChunkStore:
    # Imported where it is used: half a second that agents without Redis need not spend.
    from kvist_connector.tiers.redis import RedisServer, RedisStore

    _readable("redis.password_file", settings.password_file)
    _readable("redis.ca_file", settings.ca_file)
    stores: dict[str, ChunkStore] = {}
    for url in settings.urls:
        server = RedisServer(
            url,
            password_file=settings.password_file,
            ca_file=settings.ca_file,
            ttl=settings.ttl,
            connect_timeout=settings.deadline,
            # Questions, deletions and lists need connections beside those that move bytes.
            connections=settings.concurrency + 4,
        )
        if server.label in stores:
            raise ConfigError(f"redis.urls: {server.label} is named twice: remove one")
        stores[server.label] = _guarded(RedisStore(server), settings)
    return SpreadStore(stores)


def _object_store(settings: ObjectStoreSettings, url: str, threads: Executor) -> ChunkStore:
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
    return _guarded(ObjectStore(open_backend(bucket), url, threads), settings)


def _guarded(store: ChunkStore, settings: RedisSettings | ObjectStoreSettings) -> ChunkStore:
    return DeadlineStore(
        store,
        settings.deadline,
        failures=_FAILURES,
        pause=settings.pause,
        # The rest of a lookup's time is for a second question.
        ask=settings.lookup_deadline / 2,
        most=settings.concurrency,
    )


def _readable(name: str, path: Path | None) -> None:
    if path is None:
        return
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from error
