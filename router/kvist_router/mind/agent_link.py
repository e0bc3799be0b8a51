"""How agents are addressed (reader id, bearer token), why a stream ended. Called by readers and drain.py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from kvist_connector.protocol.framing import FrameError
from kvist_connector.setting_files import text_of
from kvist_connector.tls import LiveContext
from kvist_router.errors import FeedError

STREAM_ERRORS: Final = (TimeoutError, FeedError, FrameError, aiohttp.ClientError, OSError)


def why_ended(error: Exception) -> str:
    """What a reader says of one of STREAM_ERRORS."""
    if isinstance(error, TimeoutError):
        return "no frame in time"
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
