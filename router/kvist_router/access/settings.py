"""Settings of API keys and tenants. Part of settings.RouterSettings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvist_connector.settings import Settings

TENANT_NAME = r"^[A-Za-z0-9._-]+$"
MAX_TENANTS = 1024
MAX_TENANT_BYTES = 512  # of a name that a gateway gives


class AuthSettings(Settings):
    """Who may send requests."""

    keys_file: Path | None = Field(
        default=None,
        description="file with the accepted API keys, one a line: `sha256:HEX`, or `sha256:HEX TENANT`; read "
        "again when it changes; none, and no keys of tenants either: everybody may",
    )


class ShareSettings(Settings):
    """What a tenant may use."""

    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="its tokens for each one of a tenant of weight 1 while both wait",
    )
    priority: int = Field(
        default=0, ge=-100, le=100, description="those of a lower number go first while requests wait"
    )
    requests_per_minute: float | None = Field(
        default=None,
        gt=0,
        description="requests a minute; a minute's worth may come at once; none: any",
    )
    tokens_per_minute: float | None = Field(
        default=None,
        gt=0,
        description="tokens of prompts and answers a minute; a minute's worth may come at once; none: any",
    )
    cache_tokens: int | None = Field(
        default=None,
        ge=0,
        description="tokens whose KV each replica keeps of it in memory and on disk; none: as there is room",
    )


class AdmissionSettings(Settings):
    """The queue in front of the replicas."""

    per_replica: int = Field(
        default=0,
        ge=0,
        description="most requests sent and not ended for each replica that is up; others wait here, by "
        "priority and by tenant in turns; 0: no bound, all wait in the engines",
    )
    waiting: int = Field(
        default=1024,
        ge=1,
        description="most requests that wait here; at one more the tenant with most tokens waiting pays",
    )
    seconds: float = Field(default=60.0, gt=0, description="longest wait, seconds; then it is refused")
    ttft_seconds: float | None = Field(
        default=None,
        gt=0,
        description="requests are refused while the least predicted TTFT is longer, seconds; none: never",
    )

    @property
    def longest_wait(self) -> float:
        """Seconds that a request may wait for its turn."""
        return self.seconds if self.per_replica else 0.0


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
    others: ShareSettings = Field(
        default=ShareSettings(),
        description="what each tenant may use that `tenants` does not name; requests without tenant are one",
    )


class TenantSettings(ShareSettings):
    """One tenant."""

    name: str = Field(max_length=63, pattern=TENANT_NAME, description="in metrics, logs and the cache salt")
    keys_file: Path | None = Field(
        default=None, description="its API keys, one a line: `sha256:HEX`; read again when it changes"
    )


def check_tenants(tenants: tuple[TenantSettings, ...], separation: SeparationSettings) -> None:
    """Raise ValueError when two tenants share a name, or chunks that only one of them may have."""
    quotas = [share.cache_tokens for share in (*tenants, separation.others)]
    if separation.secret_file is None and any(tokens is not None for tokens in quotas):
        raise ValueError(
            "cache_tokens needs tenant.secret_file: without it tenants share what is cached; set both or none"
        )
    found: set[str] = set()
    for tenant in tenants:
        if tenant.name in found:
            raise ValueError(f"tenants: name {tenant.name!r} is given twice; keep one of the two")
        found.add(tenant.name)
