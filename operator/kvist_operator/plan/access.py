"""The router's settings of API keys, the admin port's token, tenants and TLS. Pure; called by plan.py.

Keys, tokens, certificates and the secret of tenants are files, whose paths the renderer knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvist_operator.spec import CacheCluster
from kvist_operator.spec.base import SecretRef
from kvist_operator.spec.router import Tenant

KEYS: Final = "keys"
ADMIN: Final = "admin-token"
CERTIFICATE: Final = "tls.crt"
PRIVATE_KEY: Final = "tls.key"
SECRET: Final = "secret"
_SHARE: Final = ("weight", "priority", "requests_per_minute", "tokens_per_minute", "cache_tokens")


def has_keys(cluster: CacheCluster) -> bool:
    """Whether requests need an API key."""
    router = cluster.spec.router
    return router.auth.api_keys is not None or bool(router.tenants)


def access_token(file: str) -> str:
    """The name of the file's path among a plan's placeholders."""
    return f"path.access/{file}"


class AccessFile(NamedTuple):
    """A file of the user's: its name, where its text comes from, and where the manifest says so."""

    name: str
    ref: SecretRef
    field: str


def access_files(cluster: CacheCluster) -> Iterator[AccessFile]:
    """All that the manifest names."""
    router = cluster.spec.router
    if router.auth.api_keys is not None:
        yield AccessFile(KEYS, router.auth.api_keys, "spec.router.auth.apiKeys")
    if router.auth.admin_token is not None:
        yield AccessFile(ADMIN, router.auth.admin_token, "spec.router.auth.adminToken")
    for i, tenant in enumerate(router.tenants):
        yield AccessFile(_file(tenant), tenant.api_keys, f"spec.router.tenants[{i}].apiKeys")
    if router.tls is not None:
        yield AccessFile(CERTIFICATE, router.tls.certificate, "spec.router.tls.certificate")
        yield AccessFile(PRIVATE_KEY, router.tls.private_key, "spec.router.tls.privateKey")


def access_settings(cluster: CacheCluster) -> dict[str, object]:
    """Part of the router's configuration; empty where everybody may come in without TLS."""
    return {**_tls(cluster), **_admin(cluster), **_keys(cluster)}


def _tls(cluster: CacheCluster) -> dict[str, object]:
    if cluster.spec.router.tls is None:
        return {}
    files = {"certificate_file": CERTIFICATE, "key_file": PRIVATE_KEY}
    return {"tls": {name: _path(file) for name, file in files.items()}}


def _admin(cluster: CacheCluster) -> dict[str, object]:
    if cluster.spec.router.auth.admin_token is None:
        return {}
    # Whoever reconciles reads the list of replicas from every router, and has no token of theirs.
    return {"admin_token_file": _path(ADMIN), "admin_list_free": True}


def _keys(cluster: CacheCluster) -> dict[str, object]:
    if not has_keys(cluster):
        return {}
    router = cluster.spec.router
    found: dict[str, Any] = {"tenant": {"secret_file": _path(SECRET)}}
    if router.auth.api_keys is not None:
        found["auth"] = {"keys_file": _path(KEYS)}
    if router.tenants:
        found["tenants"] = [_tenant(tenant) for tenant in router.tenants]
    return found


def _tenant(tenant: Tenant) -> dict[str, object]:
    shares: dict[str, object] = {
        name: getattr(tenant, name) for name in _SHARE if name in tenant.model_fields_set
    }
    return {"name": tenant.name, "keys_file": _path(_file(tenant)), **shares}


def _path(file: str) -> str:
    return f"$({access_token(file)})"


def _file(tenant: Tenant) -> str:
    return f"tenant-{tenant.name}"
