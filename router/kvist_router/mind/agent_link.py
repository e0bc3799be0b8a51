"""How agents and other routers are asked (reader id, token, certificates), and why there was no answer.

Called by readers of feeds, drain.py and the controls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from kvist_connector.protocol.framing import FrameError
from kvist_connector.setting_files import text_of
from kvist_connector.tls import LiveContext
from kvist_router.errors import FeedError

ASK_ERRORS: Final = (TimeoutError, FeedError, FrameError, aiohttp.ClientError, OSError)


def why_not(error: Exception, late: str = "no answer in time") -> str:
    """One of ASK_ERRORS in words."""
    if isinstance(error, TimeoutError):
        return late
    if isinstance(error, FeedError | FrameError):
        return str(error)
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class AgentLink:
    """`reader` is this router's name at every agent."""

    reader: str
    token_file: Path | None = None
    tls: LiveContext | None = None
    serving: LiveContext | None = None  # of the port where other routers read, who show the same certificates

    def security(self) -> dict[str, Any]:
        """Arguments of a request by which TLS is spoken to agents that have it."""
        return {} if self.tls is None else {"ssl": self.tls(), "server_hostname": self.tls.name}

    async def headers(self) -> dict[str, str]:
        """Of one request. The token is read anew: it changes when its Secret is rotated. Raises FeedError."""
        if self.token_file is None:
            return {}
        try:
            token = (await asyncio.to_thread(text_of, self.token_file)).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise FeedError(f"agent.token_file: {self.token_file} cannot be read: {error}") from error
        if not token.isascii() or not token.isprintable():
            raise FeedError(f"agent.token_file: {self.token_file} holds no bearer token: one line of ASCII")
        return {"Authorization": f"Bearer {token}"}

    @asynccontextmanager
    async def asked(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        limits: aiohttp.ClientTimeout,
        **question: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer; raises ASK_ERRORS."""
        headers, security = await self.headers(), self.security()
        async with session.request(
            method, url, headers=headers, timeout=limits, **security, **question
        ) as answer:
            yield answer

    @asynccontextmanager
    async def stream(
        self, session: aiohttp.ClientSession, url: str, silent_seconds: float, **question: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One that goes on until nothing comes for so long; raises ASK_ERRORS."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=silent_seconds, sock_read=silent_seconds)
        async with self.asked(session, "GET", url, limits, **question) as answer:
            if answer.status == 401:
                raise FeedError("status 401: is agent.token_file the same as there?")
            if answer.status != 200:
                raise FeedError(f"status {answer.status}")
            yield answer
