"""One attempt at an engine. Called by relay/app.py.

`open` returns when the first body byte (or an empty body's end) is there, so until then the
request may go elsewhere. `close` closes the engine's connection unless the answer was read to its
end: that is how a cancelled request ends in the engine.
"""

from __future__ import annotations

import aiohttp
from yarl import URL

from kvist_router.errors import UpstreamError
from kvist_router.settings import LimitSettings

BROKEN = (aiohttp.ClientError, OSError)
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
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_seconds),
        read_bufsize=_READ_BYTES,
    )


class Attempt:
    """An engine's answer whose first piece has arrived. `close` it in every case."""

    def __init__(self, response: aiohttp.ClientResponse, first: bytes) -> None:
        self.status = response.status
        self.headers = response.raw_headers
        self.first = first
        self.content = response.content  # `readany` raises one of BROKEN when the engine breaks off
        self._response = response

    def close(self) -> None:
        """Close the connection, unless the answer was read to its end and gave it back."""
        self._response.close()


class Upstream:
    """Opens attempts. Deadlines beyond connecting are the caller's (relay/watch.py)."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def open(self, url: str, headers: list[tuple[str, str]], body: bytes) -> Attempt:
        """One attempt; raises UpstreamError before the first byte."""
        try:
            response = await self._session.post(
                URL(url, encoded=True), data=body, headers=headers, allow_redirects=False
            )
            try:
                return Attempt(response, await response.content.readany())
            except BaseException:
                response.close()
                raise
        except TimeoutError as error:
            raise UpstreamError("no connection in time", unreachable=True) from error
        except aiohttp.ClientConnectorError as error:
            raise UpstreamError(f"cannot connect: {error.os_error.strerror}", unreachable=True) from error
        except BROKEN as error:
            raise broke_off(error) from error


def broke_off(error: Exception) -> UpstreamError:
    """An engine's connection ended before its answer did."""
    return UpstreamError(f"broke off: {error or type(error).__name__}")
