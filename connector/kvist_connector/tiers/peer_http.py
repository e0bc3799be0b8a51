"""The HTTP transfer between agents: one connection an object at a time, kept for the next.

Nothing of an answer is believed beyond its bounds: lengths are checked before bytes are read,
redirects are not followed, no encoding is undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import msgspec

from kvist_connector import names
from kvist_connector.errors import ConfigError, TierError
from kvist_connector.protocol.peer import CONTENT_TYPE, MAX_BODY_BYTES, Question, Sizes
from kvist_connector.tiers.base import Read
from kvist_connector.tiers.peer import Transfer
from kvist_connector.tiers.peer_connection import Answer, Connection, TlsConnection
from kvist_connector.tls import LiveContext

_REASONS: Final = {
    401: "refuses the token: give both agents the same http.token_file",
    503: "has too many reads",
}


class HttpTransfer(Transfer):
    """`url` of a peer port, `token` of the cluster. Nothing is connected before the first call.

    With `tls` connections have it, whatever scheme the address is written with.
    """

    def __init__(
        self,
        url: str,
        token: Callable[[], str] | None,
        connections: int,
        connect_timeout: float,
        tls: LiveContext | None = None,
    ) -> None:
        self._tls = tls
        self._url = url.rstrip("/")
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or names.PORT_PEER
        self._authority = parts.netloc
        self._token = token
        self._connect_timeout = connect_timeout
        self._idle: list[Connection] = []
        self._turn = asyncio.Semaphore(connections)
        self._closed = False

    async def sizes(self, asked: Sequence[bytes]) -> Sequence[int | None]:
        """See Transfer."""
        data = await self._posted(names.PATH_PEER_ASK, msgspec.msgpack.encode(Question(names=tuple(asked))))
        try:
            found = msgspec.msgpack.decode(data, type=Sizes).sizes
        except msgspec.DecodeError as error:
            raise TierError(f"{self._url} answers with something else than sizes: {error}") from error
        if len(found) != len(asked):
            raise TierError(f"{self._url} answers with {len(found)} sizes for {len(asked)} names")
        return found

    async def read(self, read: Read) -> int | None:
        """See Transfer."""
        path = f"{names.PATH_PEER_CHUNKS}/{read.key.hex()}"
        async with self._exchange("GET", path) as (connection, answer):
            if answer.status == 404:
                return None
            length = self._expect(answer)
            await connection.receive(read.into, read.seen)
        return length

    async def give(self, take: bytes) -> bytes:
        """See Transfer."""
        return await self._posted(names.PATH_PEER_TAKE, take)

    async def close(self) -> None:
        """See Transfer."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def _posted(self, path: str, body: bytes) -> bytes:
        async with self._exchange("POST", path, body) as (connection, answer):
            length = self._expect(answer)
            if length > MAX_BODY_BYTES:
                raise TierError(
                    f"{self._url} answers with {length} bytes, at most {MAX_BODY_BYTES} are right"
                )
            data = bytearray(length)
            await connection.receive([memoryview(data)])
        return bytes(data)

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncIterator[tuple[Connection, Answer]]:
        """A request's answer; what was not received of it is skipped, or the connection ends."""
        async with self._turn:
            connection = None
            try:
                request = self._head(method, path, len(body)) + body
                connection, answer = await self._asked(request)
                yield connection, answer
                if await connection.finish() and answer.kept and not self._closed:
                    self._idle.append(connection)
                    connection = None
            except (OSError, ValueError, ConfigError) as error:
                raise TierError(f"{self._url}: {str(error) or type(error).__name__}") from error
            finally:
                if connection is not None:
                    connection.close()

    async def _asked(self, request: bytes) -> tuple[Connection, Answer]:
        while True:
            connection = self._idle.pop() if self._idle else await self._connected()
            again = connection.used
            try:
                return connection, await connection.ask(request)
            except ConnectionError:
                connection.close()
                # A kept connection may have been closed while nobody used it.
                if not again or connection.answered:
                    raise
            except BaseException:
                connection.close()
                raise

    async def _connected(self) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout):
                if self._tls is not None:
                    return await TlsConnection.open_tls(self._host, self._port, self._tls)
                return await Connection.open(self._host, self._port)
        except TimeoutError as error:
            raise OSError(f"no connection within {self._connect_timeout:g} s") from error

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._authority}", f"Content-Length: {length}"]
        lines.append(f"Content-Type: {CONTENT_TYPE}")
        if self._token is not None:
            token = self._token()
            if not token.isascii() or not token.isprintable():
                raise ConfigError("http.token_file holds no bearer token: one line of ASCII")
            lines.append(f"Authorization: Bearer {token}")
        return "\r\n".join((*lines, "", "")).encode()

    def _expect(self, answer: Answer) -> int:
        if answer.status != 200:
            raise TierError(f"{self._url} {_REASONS.get(answer.status, f'answers with {answer.status}')}")
        if answer.length is None:
            raise TierError(f"{self._url} does not say how long its answer is")
        return answer.length
