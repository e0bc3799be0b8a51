"""One attempt at an engine. Called by relay/app.py.

`open` returns when the first body byte (or an empty body's end) is there, so until then the
request may go elsewhere. Leaving the context closes the engine's connection unless the answer
was read to its end: that is how a cancelled request ends in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from yarl import URL

from kvist_router.errors import UpstreamError, UpstreamTimeoutError
from kvist_router.settings import LimitSettings

_READ_BYTES = 2**18
_OWN_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def new_session(limits: LimitSettings) -> aiohttp.ClientSession:
    """A session for engines: explicit limits, no cookies, bodies as they come. Close it at the end."""
    connector = aiohttp.TCPConnector(
        limit=limits.connections, limit_per_host=0, keepalive_timeout=30.0, ttl_dns_cache=10
    )
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_OWN_HEADERS,
        # Until the first byte `open` has the deadline, afterwards relay/watch.py.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_seconds),
        read_bufsize=_READ_BYTES,
    )


class Attempt:
    """An engine's answer whose first piece has arrived."""

    def __init__(self, response: aiohttp.ClientResponse, first: bytes) -> None:
        self.status = response.status
        self.headers = response.raw_headers
        self.first = first
        self._content = response.content

    async def rest(self) -> AsyncIterator[bytes]:
        """The pieces after the first, as they come; raises UpstreamError when the engine breaks off."""
        try:
            while piece := await self._content.readany():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(f"broke off: {error or type(error).__name__}") from error


class Upstream:
    """Opens attempts."""

    def __init__(self, session: aiohttp.ClientSession, limits: LimitSettings) -> None:
        self._session = session
        self._limits = limits

    @asynccontextmanager
    async def open(self, url: str, headers: list[tuple[str, str]], body: bytes) -> AsyncIterator[Attempt]:
        """One attempt; raises UpstreamError before the first byte."""
        response = await self._first(url, headers, body)
        try:
            yield response[1]
        finally:
            response[0].close()  # a response read to its end has given its connection back already

    async def _first(
        self, url: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[aiohttp.ClientResponse, Attempt]:
        try:
            async with asyncio.timeout(self._limits.first_byte_seconds):
                response = await self._session.post(
                    URL(url, encoded=True), data=body, headers=headers, allow_redirects=False
                )
                try:
                    first = await response.content.readany()
                except BaseException:
                    response.close()
                    raise
                return response, Attempt(response, first)
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise UpstreamError("no connection in time", unreachable=True) from error
            raise UpstreamTimeoutError("no answer in time") from error
        except aiohttp.ClientConnectorError as error:
            raise UpstreamError(f"cannot connect: {error.os_error.strerror}", unreachable=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(f"broke off: {error or type(error).__name__}") from error
