"""Settings of API keys and tenants. Part of settings.RouterSettings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvist_connector.settings import Settings

TENANT_NAME = r"^[A-Za-z0-9._-]+$"
MAX_TENANTS = 1024


class AuthSettings(Settings):
    """Who may send requests."""

    keys_file: Path | None = Field(
        default=None,
        description="file with the accepted API keys, one a line: `sha256:HEX`, or `sha256:HEX TENANT`; read "
        "again when it changes; none, and no keys of tenants either: everybody may",
    )


class SeparationSettings(Settings):
    """Separation of tenants in the cache."""

    secret_file: Path | None = Field(
        default=None, description="cluster secret; with it every request's cache salt is HMAC(secret, tenant)"
    )
    header: str = Field(
        default="x-tenant",
        pattern=r"^[a-z0-9-]+$",
        description="request header that holds the tenant's name, set by a gateway in front; not looked at "
        "when there are API keys: then the key says it",
    )


class TenantSettings(Settings):
    """One tenant."""

    name: str = Field(max_length=63, pattern=TENANT_NAME, description="in metrics, logs and the cache salt")
    keys_file: Path | None = Field(
        default=None, description="its API keys, one a line: `sha256:HEX`; read again when it changes"
    )


def check_tenants(tenants: tuple[TenantSettings, ...]) -> None:
    """Raise ValueError when two tenants share a name."""
    found: set[str] = set()
    for tenant in tenants:
        if tenant.name in found:
            raise ValueError(f"tenants: name {tenant.name!r} is given twice; keep one of the two")
        found.add(tenant.name)
