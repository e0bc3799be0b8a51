"""Chunks in a Redis server: one string value a chunk, `kvist:<scope>:<key>` in hexadecimal.

One store is one server, or whichever one the Sentinels name; `spread.SpreadStore` makes one of
several, `redis_cluster.ClusterStore` one of a Redis Cluster. Shared by every agent that is given
the address: a put is `SET NX`, so a chunk is there once. Values move in pieces: a
read asks for ranges, a write sends its one command bit by bit, so that neither holds the
loop nor needs a second copy of the chunk. There are no deadlines here but for connecting: a
cancelled call closes its connection. What Redis evicts or lets expire is a miss.

Of a server that is being given slots of another one every command is asked after an `ASKING`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
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
# Begins the error of a server whose own disk is full: it takes nothing, and answers questions still.
_CANNOT_SAVE: Final = "MISCONF"


class ComingError(ElsewhereError):
    """The key's slot is being moved and the key is not here (any more): where it is going is to be asked."""

    def __init__(self, message: str, host: str, port: int) -> None:
        super().__init__(message)
        self.host = host
        self.port = port


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
                piece = _bytes(*await self._ask(("GETRANGE", name, position, end - 1)))
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
            if _count(*await self._ask(("EXISTS", name))):
                return False
            async with self._connection() as connection:
                await self._announce(connection)
                await self._send_set(connection, name, parts, size, [b"NX"])
                return _done(await connection.read_response())

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore; one transaction, which Redis gives up when the key changes meanwhile."""
        name = name_of(key)
        with self._in_words(StorageFull):
            async with self._connection() as connection:
                try:
                    if await self._watch(connection, name, len(seen)) == seen:
                        return await self._exchange(connection, name, parts)
                    await _answer(connection, "UNWATCH")
                except BaseException:
                    # Amid a transaction it is of no use to anybody.
                    await connection.disconnect(nowait=True)
                    raise
        return False

    async def delete(self, key: bytes) -> bool:
        """See ChunkStore."""
        with self._in_words():
            return bool(_count(*await self._ask(("UNLINK", name_of(key)))))

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
        commands: list[tuple[str | bytes | int, ...]] = [("STRLEN", name)]
        if filler.room:
            commands.append(("GETRANGE", name, 0, min(PIECE_BYTES, filler.room) - 1))
        length, *pieces = await self._ask(*commands)
        for piece in pieces:
            filler.put(_bytes(piece))
        return _count(length)

    async def _lengths(self, names: Sequence[bytes]) -> list[int | Exception]:
        found = await self._ask(*(("STRLEN", name) for name in names), errors=True)
        return [length if isinstance(length, Exception) else _count(length) for length in found]

    async def _ask(self, *commands: tuple[str | bytes | int, ...], errors: bool = False) -> list[Any]:
        """The answers to commands that are sent together; `errors` are returned or the first one raised."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            if self._server.asking:
                pipeline.execute_command("ASKING")
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=not errors)
        return answers[1::2] if self._server.asking else answers

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AbstractConnection]:
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            yield connection
        finally:
            await self._pool.release(connection)

    async def _watch(self, connection: AbstractConnection, name: bytes, length: int) -> bytes:
        """The first bytes of the value, which is watched from before they were read."""
        for command in (("WATCH", name), ("GETRANGE", name, 0, length - 1)):
            await self._announce(connection)
            answer = await _answer(connection, *command)
        return _bytes(answer)

    async def _exchange(self, connection: AbstractConnection, name: bytes, parts: Sequence[Buffer]) -> bool:
        """Set the watched value; false when it has changed."""
        await self._announce(connection)  # whatever the transaction holds is asked in the same way
        await _answer(connection, "MULTI")
        await self._send_set(connection, name, parts, total_bytes(parts), [])
        await connection.read_response()
        answer = await _answer(connection, "EXEC")
        return answer is not None and all(_done(each) for each in answer)

    async def _announce(self, connection: AbstractConnection) -> None:
        """The next command is for a slot that this server is being given, if it is."""
        if self._server.asking:
            await _answer(connection, "ASKING")

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

    async def _send_set(
        self,
        connection: AbstractConnection,
        name: bytes,
        parts: Sequence[Buffer],
        size: int,
        tail: list[bytes],
    ) -> None:
        if self._server.ttl is not None:
            tail = [*tail, b"PX", str(max(1, round(self._server.ttl * 1000))).encode()]
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (3 + len(tail), len(name), name, size)
        # A call that is cut off here closes the connection: the server forgets half a command with it.
        await _go_on(connection, head)
        for piece in copies(parts, _SEND_BYTES):
            await _go_on(connection, piece)
        words = b"".join(b"\r\n$%d\r\n%s" % (len(word), word) for word in tail)
        await _go_on(connection, words + b"\r\n")

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
        if isinstance(error, exceptions.OutOfMemoryError) or str(error).startswith(_CANNOT_SAVE):
            return full(f"{label} is full: {error}")
        text = f"{label}: {explain(error, self._server)}"
        if not isinstance(error, exceptions.AskError) or not self._server.cluster:
            return TierError(text)
        if isinstance(error, exceptions.MovedError):
            return ElsewhereError(text)
        return ComingError(text, error.host, error.port)


async def _answer(connection: AbstractConnection, *command: str | bytes | int) -> Any:
    """To a command on the connection as it is: made anew it would have forgotten what went before."""
    await _go_on(connection, b"".join(connection.pack_command(*command)))
    return await connection.read_response()


async def _go_on(connection: AbstractConnection, data: bytes) -> None:
    """Send what follows of a command; on a connection made anew it would be read as commands."""
    if not connection.is_connected:
        raise exceptions.ConnectionError("the connection was closed amid what was being asked")
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


def _done(answer: Any) -> bool:
    """What a SET says; false when its condition did not hold."""
    if answer not in (None, b"OK"):
        raise _unexpected(answer)
    return answer is not None


def _bytes(answer: Any) -> bytes:
    if not isinstance(answer, bytes):
        raise _unexpected(answer)
    return answer


def _unexpected(answer: Any) -> exceptions.InvalidResponse:
    return exceptions.InvalidResponse(f"unexpected answer of type {type(answer).__name__}")
