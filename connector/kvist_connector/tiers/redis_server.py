"""How a Redis server is reached: its address, its password, and who says which server it is.

Called by `redis` and `redis_cluster`. An address is a server's own, or that of the Sentinels who
know which server is the primary now: they are asked at every connect, so a failover needs no
restart. Nothing is connected before the first call.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Sentinel, SentinelConnectionPool
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from kvist_connector.errors import TierError
from kvist_connector.setting_files import text_of
from kvist_connector.tiers.redis_frames import BoundedParser


@dataclass(frozen=True)
class Sentinels:
    """Who is asked for the address of the primary `primary`."""

    urls: tuple[str, ...]
    primary: str
    password_file: Path | None = None  # of the Sentinels themselves


@dataclass(frozen=True)
class RedisServer:
    """Where a server is and how to talk to it. Seconds throughout."""

    url: str  # redis://[user@]host:port/db, rediss://..., unix:///path; with Sentinels: one of theirs
    password_file: Path | None = None  # read at every connect, so that it can be rotated
    ca_file: Path | None = None  # of rediss; None: the system's
    ttl: float | None = None  # age at which a chunk is dropped; None: never
    connect_timeout: float = 5.0  # of a connection, or of waiting for a free one
    connections: int = 16
    sentinels: Sentinels | None = None
    cluster: bool = False  # it is one of several that hold the keys together
    asking: bool = False  # it is asked for keys of slots that it is being given

    @property
    def label(self) -> str:
        """The address without user, for messages and for spreading keys."""
        if self.sentinels is not None:
            return (
                f"{self.sentinels.primary} of the Sentinels {', '.join(map(label_of, self.sentinels.urls))}"
            )
        return label_of(self.url)


def label_of(url: str) -> str:
    """An address without user."""
    parts = urlsplit(url)
    host = f"{address_of(url)[0]}:{address_of(url)[1]}" if parts.hostname else ""
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


def address_of(url: str) -> tuple[str, int]:
    """Host and port."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 6379


def open_pool(server: RedisServer) -> BlockingConnectionPool:
    """Its connections."""
    options = _connection_options(server)
    options |= {"max_connections": server.connections, "timeout": server.connect_timeout}
    if server.sentinels is None:
        return BlockingConnectionPool(**options)
    secured = options.pop("connection_class", None) is SSLConnection
    for name in ("host", "port"):
        options.pop(name, None)
    watch = _Watch(server, server.sentinels, {"ssl": True} if secured else {})
    options["ssl"] = secured
    return _PrimaryPool(server.sentinels.primary, watch, **options)  # type: ignore[no-untyped-call]


async def close_pool(pool: BlockingConnectionPool) -> None:
    """Every connection, those to Sentinels too."""
    await pool.aclose()
    if isinstance(pool, _PrimaryPool):
        await pool.sentinel_manager.aclose()


def explain(error: Exception, server: RedisServer) -> str:
    """What to do about an error of the client."""
    if isinstance(error, exceptions.MovedError | exceptions.AskError | exceptions.ClusterDownError):
        return _explain_cluster(error, server)
    remedy = {
        MasterNotFoundError: "no Sentinel that answers names a primary that is up: check redis.sentinel, "
        "the addresses and redis.sentinel_password_file",
        exceptions.ReadOnlyError: "this is a read-only replica: give the primary's address",
        exceptions.NoPermissionError: f"the user lacks a permission ({error}): allow it the keys kvist:* "
        "with strlen, getrange, set, exists, unlink, scan, info, watch, unwatch, multi, exec, "
        "in a cluster cluster|slots and asking too",
        exceptions.InvalidResponse: "what answers there does not speak Redis's protocol: check host and port",
        exceptions.BusyLoadingError: "Redis is loading its data",
    }
    for kind, text in remedy.items():
        if isinstance(error, kind):
            return text
    if isinstance(error, exceptions.AuthenticationError):
        where = f"the password in {server.password_file}" if server.password_file else "a missing password"
        return f"the server refuses {where} ({error}): check redis.password_file and the user in the URL"
    if not isinstance(error, exceptions.RedisError | OSError):
        return f"{remedy[exceptions.InvalidResponse]} ({type(error).__name__}: {error})"
    return str(error) or type(error).__name__


def _explain_cluster(error: Exception, server: RedisServer) -> str:
    if not server.cluster:
        return "a member of a Redis Cluster: set redis.cluster, or give servers that are in none"
    if isinstance(error, exceptions.ClusterDownError):
        return f"the cluster is down: {error}"
    return f"another member of the cluster has this key ({error})"


class _PasswordFile(CredentialProvider):
    def __init__(self, path: Path, user: str, setting: str) -> None:
        self._path = path
        self._user = user
        self._setting = setting

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = text_of(self._path).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TierError(f"{self._setting}: {self._path} cannot be read: {error}") from error
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class _PrimaryPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to whoever is the primary, and callers wait for a free one."""


class _Watch(Sentinel):
    """Sentinels; asked once for all that wait, and on after whoever waits has given up.

    A caller has less time than it takes to notice that a Sentinel hangs: if its question ended with
    it, the next one would begin with the same Sentinel.
    """

    def __init__(self, server: RedisServer, sentinels: Sentinels, extra: dict[str, Any]) -> None:
        own: dict[str, Any] = {
            "socket_timeout": server.connect_timeout,
            "socket_connect_timeout": server.connect_timeout,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            **extra,
        }
        if sentinels.password_file is not None:
            own["credential_provider"] = _PasswordFile(
                sentinels.password_file, "", "redis.sentinel_password_file"
            )
        if extra and server.ca_file is not None:
            own["ssl_ca_certs"] = str(server.ca_file)
        addresses = [address_of(url) for url in sentinels.urls]
        super().__init__(addresses, sentinel_kwargs=own)  # type: ignore[no-untyped-call]
        self._asking: asyncio.Task[tuple[str, int]] | None = None

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(super().discover_master(service_name))
            self._asking.add_done_callback(_heard)
        return await asyncio.shield(self._asking)

    async def aclose(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await super().aclose()


def _heard(task: asyncio.Task[tuple[str, int]]) -> None:
    """An error that nobody waits for is no news."""
    if not task.cancelled():
        task.exception()


def _connection_options(server: RedisServer) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_url(server.url))
    user = options.pop("username", "")
    if server.password_file is not None:
        options["credential_provider"] = _PasswordFile(server.password_file, user, "redis.password_file")
    if server.ca_file is not None and urlsplit(server.url).scheme == "rediss":
        options["ssl_ca_certs"] = str(server.ca_file)
    return options | {
        "protocol": 2,
        "socket_connect_timeout": server.connect_timeout,
        # Operations have their deadline from `deadline.DeadlineStore`.
        "socket_timeout": None,
        "socket_read_size": 1024 * 1024,
        "parser_class": BoundedParser,
        # The breaker decides when to try again; the pool replaces connections that ended.
        "retry": Retry(NoBackoff(), 0),
    }
