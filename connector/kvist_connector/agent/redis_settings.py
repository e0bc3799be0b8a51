"""Settings of the Redis tier: servers, a Redis Cluster, or whom Sentinels name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvist_connector.agent.coding_settings import COMPRESSION
from kvist_connector.agent.server_settings import concurrency, deadline, lookup_deadline, pause
from kvist_connector.settings import WITHHELD, Settings
from kvist_connector.tiers.coding import Compression


def _redis_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is not None:
        raise PydanticCustomError(
            WITHHELD, "a password in an address is seen by everybody: put it into redis.password_file"
        )
    where = parts.path if parts.scheme == "unix" else parts.hostname
    if parts.scheme not in ("redis", "rediss", "unix") or not where or parts.port == 0:
        raise ValueError("give redis://[user@]host:port/db, rediss://... for TLS, or unix:///path")
    return url


def _one_group(setting: str, urls: tuple[str, ...]) -> None:
    """Addresses of one group: what is said of one holds for all. Raises ValueError."""
    if not urls:
        raise ValueError(f"{setting} needs addresses: set redis.urls")
    parts = [urlsplit(url) for url in urls]
    if any(part.scheme == "unix" for part in parts):
        raise ValueError(f"{setting} needs hosts, and there is unix:// in redis.urls: give redis://host:port")
    if len({(part.scheme, part.username, part.path.strip("/")) for part in parts}) > 1:
        raise ValueError(f"{setting}: the addresses in redis.urls may differ in host and port only")
    if setting == "redis.cluster" and parts[0].path.strip("/") not in ("", "0"):
        raise ValueError("a Redis Cluster has database 0 only: end the addresses in redis.urls with /0")


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


RedisUrl = Annotated[str, AfterValidator(_redis_url)]
RedisUrls = Annotated[tuple[RedisUrl, ...], BeforeValidator(_split)]


class RedisSettings(Settings):
    """The Redis tier, shared by all agents that name the same servers; absent unless an address is given."""

    urls: RedisUrls = Field(
        (),
        max_length=64,
        description="addresses of Redis servers, with commas between: redis://[user@]host:port/db, rediss:// "
        "for TLS, unix:///path; keys are spread over them; default none: no Redis tier",
    )
    cluster: bool = Field(
        False,
        description="true: the addresses are members of one Redis Cluster, which names the others; "
        "default false",
    )
    sentinel: str | None = Field(
        None,
        min_length=1,
        description="name of the primary that the Sentinels at the addresses watch: chunks are with "
        "whichever server that is; default none: the addresses are those of the servers",
    )
    sentinel_password_file: Path | None = Field(
        None, description="file with the password of the Sentinels themselves; default none"
    )
    password_file: Path | None = Field(
        None, description="file with the password, read again at every connect; default none"
    )
    ca_file: Path | None = Field(
        None, description="CA certificates that rediss servers are checked by; default the system's"
    )
    ttl: float | None = Field(
        None,
        gt=0,
        le=10 * 366 * 86400,
        description="seconds after which Redis drops a chunk; default none: never",
    )
    lookup_deadline: float = lookup_deadline(0.1, "what Redis has")
    deadline: float = deadline(2.0)
    pause: float = pause(5.0, "failing Redis")
    concurrency: int = concurrency(8, "read or written at a time, each server")
    compression: Compression = Field("none", description=COMPRESSION)

    @model_validator(mode="after")
    def _one_kind(self) -> RedisSettings:
        if self.cluster and self.sentinel is not None:
            raise ValueError("redis.cluster and redis.sentinel exclude each other: set one of them")
        if self.sentinel_password_file is not None and self.sentinel is None:
            raise ValueError("redis.sentinel_password_file is for Sentinels: set redis.sentinel too")
        if self.cluster or self.sentinel is not None:
            _one_group("redis.cluster" if self.cluster else "redis.sentinel", self.urls)
        return self
