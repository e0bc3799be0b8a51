"""Chunks in a Redis server: one string value a chunk, `kvist:<scope>:<key>` in hexadecimal.

One store is one server; `spread.SpreadStore` makes one of several. Shared by every agent that
is given the address: a put is `SET NX`, so a chunk is there once. Values move in pieces: a
read asks for ranges, a write sends its one command bit by bit, so that neither holds the
loop nor needs a second copy of the chunk. There are no deadlines here but for connecting: a
cancelled call closes its connection. What Redis evicts or lets expire is a miss.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.tiers.base import (
    Buffer,
    Capabilities,
    Capacity,
    ChunkStore,
    Item,
    Read,
    total_bytes,
)
from kvist_connector.tiers.pieces import PIECE_BYTES, Filler, copies

# Of Redis itself: proto-max-bulk-len.
LARGEST_VALUE: Final = 512 * 1024 * 1024
_KEY_BYTES: Final = 16
_SCAN_BATCH: Final = 1000
_SEND_BYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class RedisServer:
    """Where a server is and how to talk to it. Seconds throughout."""

    url: str  # redis://[user@]host:port/db, rediss://..., unix:///path
    password_file: Path | None = None  # read at every connect, so that it can be rotated
    ca_file: Path | None = None  # of rediss; None: the system's
    ttl: float | None = None  # age at which a chunk is dropped; None: never
    connect_timeout: float = 5.0  # of a connection, or of waiting for a free one
    connections: int = 16

    @property
    def label(self) -> str:
        """The address without user, for messages and for spreading keys."""
        parts = urlsplit(self.url)
        host = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else ""
        return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


class _PasswordFile(CredentialProvider):
    def __init__(self, path: Path, user: str) -> None:
        self._path = path
        self._user = user

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TierError(f"redis.password_file: {self._path} cannot be read: {error}") from error
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class RedisStore(ChunkStore):
    """See module. Nothing is connected before the first call."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._pool = BlockingConnectionPool(
            max_connections=server.connections, timeout=server.connect_timeout, **_connection_options(server)
        )
        self._client: Redis = Redis(connection_pool=self._pool)

    @property
    def capabilities(self) -> Capabilities:
        """Every agent's."""
        return Capabilities(persistent=True, shared=True, listable=True, largest=LARGEST_VALUE)

    async def get(self, read: Read) -> int | None:
        """See ChunkStore; one round trip a piece."""
        filler, name = Filler(read.into), _name(read.key)
        with self._in_words():
            length = await self._first(name, filler)
            position = min(length, PIECE_BYTES)
            while filler.room and position < length:
                end = position + min(PIECE_BYTES, filler.room)
                piece: Any = await self._client.getrange(name, position, end - 1)
                if not piece:
                    return None  # evicted or deleted meanwhile
                filler.put(piece)
                position += len(piece)
        return length or None

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """See ChunkStore; one round trip."""
        try:
            with self._in_words():
                return [length or None for length in await self._lengths([_name(key) for key in keys])]
        except TierError as error:
            return [error] * len(keys)

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore; raises StorageFull when Redis has a memory limit and may evict nothing."""
        name, size = _name(key), total_bytes(parts)
        if size > LARGEST_VALUE:
            raise TierError(f"{size} bytes: a Redis value has at most {LARGEST_VALUE}")
        with self._in_words():
            # Asking first costs a round trip and saves sending what another agent has stored.
            if await self._client.exists(name):
                return False
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            try:
                return await self._set(connection, name, parts, size)
            finally:
                await self._pool.release(connection)

    async def delete(self, key: bytes) -> bool:
        """See ChunkStore."""
        with self._in_words():
            return bool(await self._client.unlink(_name(key)))

    async def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """See ChunkStore."""
        with self._in_words():
            batch: list[bytes] = []
            async for name in self._client.scan_iter(match=_pattern(prefix), count=_SCAN_BATCH):
                batch.append(name)
                if len(batch) == _SCAN_BATCH:
                    for item in await self._sized(batch):
                        yield item
                    batch.clear()
            for item in await self._sized(batch):
                yield item

    async def capacity(self) -> Capacity:
        """Of the whole server, whoever uses it."""
        with self._in_words():
            memory: dict[str, Any] = await self._client.info("memory")
        return Capacity(int(memory["used_memory"]), int(memory.get("maxmemory", 0)) or None)

    async def close(self) -> None:
        """See ChunkStore."""
        with self._in_words():
            await self._client.aclose()
            await self._pool.aclose()

    async def _first(self, name: bytes, filler: Filler) -> int:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.strlen(name)
        if filler.room:
            pipeline.getrange(name, 0, min(PIECE_BYTES, filler.room) - 1)
        length, *pieces = await pipeline.execute()
        for piece in pieces:
            filler.put(piece)
        return int(length)

    async def _lengths(self, names: Sequence[bytes]) -> list[int]:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.strlen(name)
        return [int(length) for length in await pipeline.execute()]

    async def _sized(self, names: Sequence[bytes]) -> list[Item]:
        keys = [_key(name) for name in names]
        lengths = await self._lengths(names) if names else []
        return [Item(key, size) for key, size in zip(keys, lengths, strict=True) if key is not None and size]

    async def _set(
        self, connection: AbstractConnection, name: bytes, parts: Sequence[Buffer], size: int
    ) -> bool:
        tail = [b"NX"]
        if self._server.ttl is not None:
            tail += [b"PX", str(max(1, round(self._server.ttl * 1000))).encode()]
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (3 + len(tail), len(name), name, size)
        # A call that is cut off here closes the connection: the server forgets half a command with it.
        await connection.send_packed_command(head)
        for piece in copies(parts, _SEND_BYTES):
            await connection.send_packed_command(piece, check_health=False)
        words = b"".join(b"\r\n$%d\r\n%s" % (len(word), word) for word in tail)
        await connection.send_packed_command(words + b"\r\n", check_health=False)
        return await connection.read_response() is not None

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except exceptions.OutOfMemoryError as error:
            raise StorageFull(f"{self._server.label} is full: {error}") from error
        except (exceptions.RedisError, OSError) as error:
            raise TierError(f"{self._server.label}: {_explain(error, self._server)}") from error


def _connection_options(server: RedisServer) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_url(server.url))
    user = options.pop("username", "")
    if server.password_file is not None:
        options["credential_provider"] = _PasswordFile(server.password_file, user)
    if server.ca_file is not None and urlsplit(server.url).scheme == "rediss":
        options["ssl_ca_certs"] = str(server.ca_file)
    return options | {
        "protocol": 2,
        "socket_connect_timeout": server.connect_timeout,
        # Operations have their deadline from `deadline.DeadlineStore`.
        "socket_timeout": None,
        "socket_read_size": 1024 * 1024,
        # The breaker decides when to try again; the pool replaces connections that ended.
        "retry": Retry(NoBackoff(), 0),
    }


def _explain(error: Exception, server: RedisServer) -> str:
    cluster = "a member of a Redis Cluster: give servers that are not, keys are spread over them here"
    remedy = {
        exceptions.ReadOnlyError: "this is a read-only replica: give the primary's address",
        exceptions.NoPermissionError: f"the user lacks a permission ({error}): allow it the keys kvist:* "
        "with strlen, getrange, set, exists, unlink, scan, info",
        exceptions.InvalidResponse: "what answers there does not speak Redis's protocol: check host and port",
        exceptions.BusyLoadingError: "Redis is loading its data",
        exceptions.MovedError: cluster,
        exceptions.ClusterDownError: cluster,
    }
    for kind, text in remedy.items():
        if isinstance(error, kind):
            return text
    if isinstance(error, exceptions.AuthenticationError):
        where = f"the password in {server.password_file}" if server.password_file else "a missing password"
        return f"the server refuses {where} ({error}): check redis.password_file and the user in the URL"
    return str(error) or type(error).__name__


def _name(key: bytes) -> bytes:
    scope, own = key[:-_KEY_BYTES].hex(), key[-_KEY_BYTES:].hex()
    return f"kvist:{scope}:{own}".encode()


def _pattern(prefix: bytes) -> str:
    """Names of keys that begin with the prefix: a whole scope, or nothing."""
    return f"kvist:{prefix.hex()}:*" if prefix else "kvist:*"


def _key(name: bytes) -> bytes | None:
    try:
        _, scope, own = name.decode().split(":")
        key = bytes.fromhex(scope) + bytes.fromhex(own)
    except ValueError:
        return None
    return key if len(own) == 2 * _KEY_BYTES else None
