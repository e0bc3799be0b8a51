"""The router's settings of API keys and tenants. Pure; called by plan.py.

Keys and the secret of tenants are files, whose folder the renderer knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvist_operator.spec import CacheCluster
from kvist_operator.spec.base import SecretRef
from kvist_operator.spec.router import Tenant

KEYS: Final = "keys"
SECRET: Final = "secret"
_SHARE: Final = ("weight", "priority", "requests_per_minute", "tokens_per_minute")


def has_keys(cluster: CacheCluster) -> bool:
    """Whether requests need an API key."""
    router = cluster.spec.router
    return router.auth.api_keys is not None or bool(router.tenants)


def key_files(cluster: CacheCluster) -> Iterator[tuple[str, SecretRef]]:
    """Name inside the folder, and where its text comes from."""
    router = cluster.spec.router
    if router.auth.api_keys is not None:
        yield KEYS, router.auth.api_keys
    for tenant in router.tenants:
        yield _file(tenant), tenant.api_keys


def access_settings(cluster: CacheCluster) -> dict[str, object]:
    """Part of the router's configuration; empty where nobody needs a key."""
    if not has_keys(cluster):
        return {}
    router = cluster.spec.router
    found: dict[str, Any] = {"tenant": {"secret_file": f"$(path.access)/{SECRET}"}}
    if router.auth.api_keys is not None:
        found["auth"] = {"keys_file": f"$(path.access)/{KEYS}"}
    if router.tenants:
        found["tenants"] = [_tenant(tenant) for tenant in router.tenants]
    return found


def _tenant(tenant: Tenant) -> dict[str, object]:
    shares: dict[str, object] = {
        name: getattr(tenant, name) for name in _SHARE if name in tenant.model_fields_set
    }
    return {"name": tenant.name, "keys_file": f"$(path.access)/{_file(tenant)}", **shares}


def _file(tenant: Tenant) -> str:
    return f"tenant-{tenant.name}"
