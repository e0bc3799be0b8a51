"""What a router tells agents of a tenant's share of their caches: two tags of its own.

Agents count what each tenant holds and keep to it (kvist_connector.agent.quota). Called by mind/mind.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from kvist_connector.protocol.tags import QUOTA, TENANT
from kvist_router.access.settings import ShareSettings, TenantSettings

_MAX_NAME = 64  # characters of a tenant's name that a gateway gave


class CacheQuotas:
    """Of the tenants listed, and of all others."""

    def __init__(self, tenants: Iterable[TenantSettings], others: ShareSettings) -> None:
        self._tokens = {tenant.name: tenant.cache_tokens for tenant in tenants}
        self._others = others.cache_tokens

    def tags(self, tenant: str) -> tuple[str, ...]:
        """Of the tenant's requests; none where it may hold what there is room for."""
        tokens = self._tokens.get(tenant, self._others)
        return () if tokens is None else (TENANT + _short(tenant), f"{QUOTA}{tokens}")


def _short(name: str) -> str:
    if len(name) <= _MAX_NAME:
        return name
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
