"""The HTTP transfer between agents: one connection an object at a time, kept for the next.

Nothing of an answer is believed beyond its bounds: lengths are checked before bytes are read,
redirects are not followed, no encoding is undone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec

from kvist_connector import names
from kvist_connector.errors import ConfigError, TierError
from kvist_connector.protocol.peer import CONTENT_TYPE, MAX_BODY_BYTES, Question, Sizes
from kvist_connector.tiers.peer import Transfer
from kvist_connector.tiers.pieces import Filler

_READ_BYTES: Final = 1024 * 1024
_REASONS: Final = {
    401: "refuses the token: give both agents the same http.token_file",
    503: "has too many reads",
}


class HttpTransfer(Transfer):
    """`url` of a peer port, `token` of the cluster. Nothing is connected before the first call."""

    def __init__(
        self, url: str, token: Callable[[], str] | None, connections: int, connect_timeout: float
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._connections = connections
        # Operations have their deadline from `deadline.DeadlineStore`.
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout)
        self._session: aiohttp.ClientSession | None = None

    async def sizes(self, names_asked: Sequence[bytes]) -> Sequence[int | None]:
        """See Transfer."""
        body = msgspec.msgpack.encode(Question(names=tuple(names_asked)))
        async with self._answer("POST", names.PATH_PEER_ASK, data=body) as answer:
            self._expect(answer)
            try:
                found = msgspec.msgpack.decode(await self._all(answer), type=Sizes).sizes
            except msgspec.DecodeError as error:
                raise TierError(f"{self._url} answers with something else than sizes: {error}") from error
        if len(found) != len(names_asked):
            raise TierError(f"{self._url} answers with {len(found)} sizes for {len(names_asked)} names")
        return found

    async def read(self, name: bytes, into: Sequence[memoryview]) -> int | None:
        """See Transfer."""
        filler = Filler(into)
        async with self._answer("GET", f"{names.PATH_PEER_CHUNKS}/{name.hex()}") as answer:
            if answer.status == 404:
                return None
            self._expect(answer)
            length = answer.content_length
            if length is None:
                raise TierError(f"{self._url} does not say how long an object is")
            wanted = min(length, filler.room)
            got = 0
            while got < wanted:
                piece = await answer.content.read(_READ_BYTES)
                if not piece:
                    raise TierError(f"{self._url} ended an object of {length} bytes after {got}")
                got += len(piece)
                filler.put(piece)
            if got < length:
                answer.close()  # what was not wanted is not read either
        return length

    async def close(self) -> None:
        """See Transfer."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **more: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=self._connections),
                auto_decompress=False,
                read_bufsize=_READ_BYTES,
            )
        try:
            headers = {"Content-Type": CONTENT_TYPE}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token()}"
            async with self._session.request(
                method, self._url + path, headers=headers, allow_redirects=False, **more
            ) as answer:
                yield answer
        except (aiohttp.ClientError, OSError, ValueError, ConfigError) as error:
            raise TierError(f"{self._url}: {str(error) or type(error).__name__}") from error

    def _expect(self, answer: aiohttp.ClientResponse) -> None:
        if answer.status != 200:
            raise TierError(f"{self._url} {_REASONS.get(answer.status, f'answers with {answer.status}')}")

    async def _all(self, answer: aiohttp.ClientResponse) -> bytes:
        data = b""
        while piece := await answer.content.read(MAX_BODY_BYTES + 1 - len(data)):
            data += piece
            if len(data) > MAX_BODY_BYTES:
                raise TierError(f"{self._url} answers with more than {MAX_BODY_BYTES} bytes")
        return data
