"""The agent's flags for reading from other replicas, and for letting them read."""

from __future__ import annotations

from kvist_operator.spec import CacheCluster

PORT = "peer"


def has_peers(cluster: CacheCluster) -> bool:
    """Whether replicas have memory that others may read."""
    cache = cluster.spec.cache
    return cache.enabled and cache.peers.enabled and cache.memory > 0


def peer_arguments(cluster: CacheCluster) -> list[str]:
    """Empty without peers. The name of all replicas stays when they come and go, so nothing is restarted."""
    if not has_peers(cluster):
        return []
    return [
        *("--peer.host", "$(host)", "--peer.port", f"$(port.{PORT})"),
        *("--peer.urls", "$(peer.urls)", "--peer.address", "$(peer.address)"),
    ]
