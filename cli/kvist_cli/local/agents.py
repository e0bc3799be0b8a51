"""The controls of agents that starting and stopping a cluster need."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx

from kvist_cli.local.events import Event, EventKind, OnEvent
from kvist_connector.arena.locks import members_folder
from kvist_connector.names import PATH_FLUSH
from kvist_connector.quantity import counted, format_bytes

_SLACK: Final = 5.0
# The agent's files, and what a crash leaves of writing them. `deletions` is about the disk and stays: it is
# there only while the disk has files that should be gone.
_BESIDE: Final = (
    "journal",
    "journal.partial",
    "retired.json",
    "retired.json.partial",
    "deletions.partial",
    "eviction",
    "eviction.partial",
)


async def flush_agents(urls: Mapping[str, str], deadline: float, on_event: OnEvent) -> None:
    """Let every agent write to disk what is on its way; what fails is said, and nothing stops for it."""
    async with httpx.AsyncClient(timeout=deadline + _SLACK, trust_env=False) as client:
        await asyncio.gather(*(_flush(client, name, url, deadline, on_event) for name, url in urls.items()))


async def _flush(client: httpx.AsyncClient, name: str, url: str, deadline: float, on_event: OnEvent) -> None:
    try:
        answer = await client.post(url + PATH_FLUSH, json={"deadline": deadline})
        answer.raise_for_status()
        left = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        on_event(Event(EventKind.NOTE, name, f"could not be flushed: {str(error) or type(error).__name__}"))
        return
    chunks, size = left.get("pending_chunks", 0), left.get("pending_bytes", 0)
    late = f"not written to disk in time: {counted(chunks, 'chunk')}, {format_bytes(size)}"
    on_event(Event(EventKind.NOTE, name, late if chunks else "flushed"))


def remove_arena(arena: Path) -> None:
    """The arena file and what lies beside it; only when no process uses it any more."""
    for name in (arena.name, *(f"{arena.name}.{beside}" for beside in _BESIDE)):
        arena.with_name(name).unlink(missing_ok=True)
    shutil.rmtree(members_folder(arena), ignore_errors=True)
