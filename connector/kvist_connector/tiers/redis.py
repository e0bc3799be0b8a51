"""Chunks in a Redis server: one string value a chunk, `kvist:<scope>:<key>` in hexadecimal.

One store is one server, or whichever one the Sentinels name; `spread.SpreadStore` makes one of
several, `redis_cluster.ClusterStore` one of a Redis Cluster. Shared by every agent that is given
the address: a put is `SET NX`, so a chunk is there once. Values move in pieces: a
read asks for ranges, a write sends its one command bit by bit, so that neither holds the
loop nor needs a second copy of the chunk. There are no deadlines here but for connecting: a
cancelled call closes its connection. What Redis evicts or lets expire is a miss.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.tiers.base import (
    Buffer,
    Capabilities,
    Capacity,
    ChunkStore,
    ElsewhereError,
    Item,
    Read,
    total_bytes,
)
from kvist_connector.tiers.pieces import PIECE_BYTES, Filler, copies
from kvist_connector.tiers.redis_server import RedisServer, close_pool, explain, open_pool

# Of Redis itself: proto-max-bulk-len.
LARGEST_VALUE: Final = 512 * 1024 * 1024
_KEY_BYTES: Final = 16
_SCAN_BATCH: Final = 1000
_SEND_BYTES: Final = 1024 * 1024


class RedisStore(ChunkStore):
    """See module. Nothing is connected before the first call."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._pool = open_pool(server)
        self._client: Redis = Redis(connection_pool=self._pool)

    @property
    def capabilities(self) -> Capabilities:
        """Every agent's."""
        return Capabilities(persistent=True, shared=True, listable=True, largest=LARGEST_VALUE)

    async def probe(self) -> None:
        """See ChunkStore; a member of a cluster that names another one answers."""
        try:
            await super().probe()
        except ElsewhereError:
            return

    async def get(self, read: Read) -> int | None:
        """See ChunkStore; one round trip a piece."""
        filler, name = Filler(read.into), name_of(read.key)
        with self._in_words():
            length = await self._first(name, filler)
            position = min(length, PIECE_BYTES)
            while filler.room and position < length:
                end = position + min(PIECE_BYTES, filler.room)
                piece = _bytes(await self._client.getrange(name, position, end - 1))
                if not piece:
                    return None  # evicted or deleted meanwhile
                filler.put(piece)
                position += len(piece)
        return length or None

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """See ChunkStore; one round trip."""
        try:
            with self._in_words():
                lengths = await self._lengths([name_of(key) for key in keys])
        except TierError as error:
            return [error] * len(keys)
        return [self._wrapped(found) if isinstance(found, Exception) else found or None for found in lengths]

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore; raises StorageFull when Redis has a memory limit and may evict nothing."""
        name, size = name_of(key), total_bytes(parts)
        if size > LARGEST_VALUE:
            raise TierError(f"{size} bytes: a Redis value has at most {LARGEST_VALUE}")
        with self._in_words(StorageFull):
            # Asking first costs a round trip and saves sending what another agent has stored.
            if _count(await self._client.exists(name)):
                return False
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            try:
                return await self._set(connection, name, parts, size)
            finally:
                await self._pool.release(connection)

    async def delete(self, key: bytes) -> bool:
        """See ChunkStore."""
        with self._in_words():
            return bool(_count(await self._client.unlink(name_of(key))))

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
            await close_pool(self._pool)

    async def _first(self, name: bytes, filler: Filler) -> int:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.strlen(name)
        if filler.room:
            pipeline.getrange(name, 0, min(PIECE_BYTES, filler.room) - 1)
        length, *pieces = await pipeline.execute()
        for piece in pieces:
            filler.put(_bytes(piece))
        return _count(length)

    async def _lengths(self, names: Sequence[bytes]) -> list[int | Exception]:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.strlen(name)
        found = await pipeline.execute(raise_on_error=False)
        return [length if isinstance(length, Exception) else _count(length) for length in found]

    async def _sized(self, names: Sequence[bytes]) -> list[Item]:
        keys = [_key(name) for name in names]
        lengths = await self._lengths(names) if names else []
        found = []
        for key, length in zip(keys, lengths, strict=True):
            if isinstance(length, Exception):
                raise length
            if key is not None and length:
                found.append(Item(key, length))
        return found

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
            await _go_on(connection, piece)
        words = b"".join(b"\r\n$%d\r\n%s" % (len(word), word) for word in tail)
        await _go_on(connection, words + b"\r\n")
        answer = await connection.read_response()
        if answer not in (None, b"OK"):
            raise _unexpected(answer)
        return answer is not None

    @contextmanager
    def _in_words(self, full: type[TierError | StorageFull] = TierError) -> Iterator[None]:
        try:
            yield
        except TierError:
            raise
        except Exception as error:
            # The boundary to the client library, which reads a server's nonsense with any error there is.
            raise self._wrapped(error, full) from error

    def _wrapped(
        self, error: Exception, full: type[TierError | StorageFull] = TierError
    ) -> TierError | StorageFull:
        label = self._server.label
        if isinstance(error, exceptions.OutOfMemoryError):
            return full(f"{label} is full: {error}")
        moved = isinstance(error, exceptions.AskError) and self._server.cluster
        return (ElsewhereError if moved else TierError)(f"{label}: {explain(error, self._server)}")


async def _go_on(connection: AbstractConnection, data: bytes) -> None:
    """Send what follows of a command; on a connection made anew it would be read as commands."""
    if not connection.is_connected:
        raise exceptions.ConnectionError("the connection was closed while a value was sent")
    await connection.send_packed_command(data, check_health=False)


def name_of(key: bytes) -> bytes:
    """Under which a chunk lies."""
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


def _count(answer: Any) -> int:
    if not isinstance(answer, int) or answer < 0:
        raise _unexpected(answer)
    return answer


def _bytes(answer: Any) -> bytes:
    if not isinstance(answer, bytes):
        raise _unexpected(answer)
    return answer


def _unexpected(answer: Any) -> exceptions.InvalidResponse:
    return exceptions.InvalidResponse(f"unexpected answer of type {type(answer).__name__}")
