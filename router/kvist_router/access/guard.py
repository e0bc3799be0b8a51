"""Who may use the admin port. Called by admin.py and controls/routes.py.

Decisions tell one tenant what another has cached, and controls change the cache: both need the token,
the admin port's own or else the agents'. Where there is neither, only a loopback address will do.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request

from kvist_connector.setting_files import text_of
from kvist_router.errors import Refused
from kvist_router.mind.interface import Refusal


@dataclass(frozen=True)
class Guard:
    """`own`: the file with the admin port's own token; `agents`: the agents', which stands in for it."""

    own: Path | None
    agents: Path | None
    loopback: bool
    list_free: bool = False

    async def check(self, request: Request) -> None:
        """Raise Refused unless the request has the token. It is read anew: its Secret may be rotated."""
        path = self.own or self.agents
        if path is None:
            if not self.loopback:
                text = "this needs admin_token_file or agent.token_file, or a loopback admin_host"
                raise Refused(Refusal(403, text, "permission_error"))
            return
        expected = await asyncio.to_thread(
            _read, path, "admin_token_file" if self.own else "agent.token_file"
        )
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {expected}".encode()):
            text = "missing or wrong bearer token"
            raise Refused(Refusal(401, text, "authentication_error", param="Authorization"))

    async def check_reading(self, request: Request) -> None:
        """The same for what tells of replicas only: free to read without an own token, or if so set."""
        if self.own is not None and not self.list_free:
            await self.check(request)


def _read(path: Path, setting: str) -> str:
    try:
        token = text_of(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(Refusal(503, f"{setting}: {path} cannot be read", "service_unavailable")) from error
    if not token:
        raise Refused(Refusal(503, f"{setting}: {path} is empty", "service_unavailable"))
    return token
