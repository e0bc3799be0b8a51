"""Waiting until a program answers its health check."""

from __future__ import annotations

import asyncio
from typing import Final

import httpx

_PAUSES: Final = (0.05, 0.1, 0.2, 0.3)
_REQUEST_DEADLINE: Final = 5.0


async def healthy(url: str) -> None:
    """Return once GET `url` answers 200; callers bound it with a deadline."""
    attempt = 0
    # Own programs on this machine: their certificates are for the names that clients use.
    async with httpx.AsyncClient(timeout=_REQUEST_DEADLINE, trust_env=False, verify=False) as client:
        while not await _answers(client, url):
            await asyncio.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
            attempt += 1


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
