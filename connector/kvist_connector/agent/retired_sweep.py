"""Deletes what is retired from a shared store without waiting until somebody reads it.

Done by the agent that put the rule there, once for the cluster, at most a twentieth of the time. It is
cleaning and no fence: whatever it leaves (it gives up at the first failure, and looks at a bounded
number of chunks) is refused when it is read. Used by shared.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from kvist_connector.agent.authority import Authority
from kvist_connector.errors import IntegrityError
from kvist_connector.tiers.envelope import EnvelopeStore, Header

MOST_CHUNKS: Final = 131_072
_AT_ONCE: Final = 32
_REST: Final = 19.0  # seconds of rest for each one of work


async def sweep(
    store: EnvelopeStore,
    fingerprint: bytes,
    authority: Authority,
    delete: Callable[[bytes], Awaitable[None]],
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> int:
    """How many chunks were retired and are deleted. Raises TierError."""
    old: dict[bytes, Header] = {}
    batch: list[bytes] = []
    async for item in store.objects(fingerprint):
        if len(old) >= MOST_CHUNKS:
            break
        batch.append(item.key)
        if len(batch) == _AT_ONCE:
            await _look(store, batch, authority, old, pause)
            batch.clear()
    await _look(store, batch, authority, old, pause)
    parents = {key: header.parent for key, header in old.items()}
    retired = [key for key, header in old.items() if _is_retired(authority, header, parents)]
    for key in retired:
        started = time.monotonic()
        await delete(key)
        await pause(_REST * (time.monotonic() - started))
    return len(retired)


async def _look(
    store: EnvelopeStore,
    names: list[bytes],
    authority: Authority,
    old: dict[bytes, Header],
    pause: Callable[[float], Awaitable[object]],
) -> None:
    """Headers of chunks that are older than the latest rule."""
    started = time.monotonic()
    for key, _, found in await store.heads(names):
        if not isinstance(found, IntegrityError) and found.retire_epoch < authority.known.epoch:
            old[key] = found
    await pause(_REST * (time.monotonic() - started))


def _is_retired(authority: Authority, header: Header, parents: dict[bytes, bytes]) -> bool:
    return authority.surely_retires(
        header.key, header.parent, header.index, header.retire_epoch, header.tags, parents
    )
