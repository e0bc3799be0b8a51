"""The stores of the lower tiers from the settings, in order of preference, with their wrappers.

A shared store that does not answer now is no reason not to start: the breaker and the tier say
so and go on. What is wrong in the settings themselves is a ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvist_connector.agent.peer_stores import Peers
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.agent.shared_stores import open_object_store, open_redis
from kvist_connector.protocol.tiers import Tier, preferred
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.coding import Coding
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import EnvelopeStore
from kvist_connector.tiers.hang import HangGuard
from kvist_connector.tiers.metered import Meter, MeteredStore

if TYPE_CHECKING:
    from kvist_connector.tiers.encryption import Keyring

# Of the disk alone: threads in a hung file system must not be missed elsewhere.
_DISK_THREADS = 4


async def open_stores(
    settings: AgentSettings,
    threads: Executor,
    meter: Callable[[Tier], Meter],
    peers: Peers | None = None,
) -> dict[Tier, EnvelopeStore]:
    """Every configured tier below memory; raises ConfigError."""
    found: dict[Tier, ChunkStore] = {}
    keys = _keys(settings.encryption.keys_file)
    # Without I/O first: a mistake in them leaves no folder locked.
    if settings.redis.urls:
        found[Tier.REDIS] = open_redis(settings.redis)
    if settings.object_store.url is not None:
        found[Tier.OBJECT] = open_object_store(settings.object_store, settings.object_store.url, threads)
    if settings.peer.used and peers is not None:
        found[Tier.PEER] = peers.store()
    disk = settings.disk
    if disk.path is not None:
        own = ThreadPoolExecutor(_DISK_THREADS, thread_name_prefix="disk")
        store = await DiskStore.open(disk.path, disk.size, disk.fsync, own, owned=True, direct=disk.direct)
        found[Tier.DISK] = HangGuard(store, disk.deadline, _DISK_THREADS)
    exact = not settings.lossy
    codings = {
        Tier.DISK: Coding(disk.compression, keys, exact=exact),
        Tier.PEER: Coding(exact=exact),  # arenas hold chunks as they are
        Tier.REDIS: Coding(settings.redis.compression, keys, exact=exact),
        Tier.OBJECT: Coding(settings.object_store.compression, keys, exact=exact),
    }
    return {
        tier: EnvelopeStore(MeteredStore(found[tier], meter(tier)), threads, codings[tier])
        for tier in preferred(found)
    }


def _keys(path: Path | None) -> Callable[[], Keyring] | None:
    if path is None:
        return None
    from kvist_connector.agent.keys_file import KeysFile

    return KeysFile(path)
