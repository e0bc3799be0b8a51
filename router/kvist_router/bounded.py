"""Answers of engines and agents, read up to a bound: one that never ends must not fill the memory.

Called by whoever asks off the hot path: health checks, controls, questions for tokens.
"""

from __future__ import annotations

import aiohttp


async def body_of(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body; raises aiohttp.ClientPayloadError when it has more than `most` bytes."""
    found = bytearray()
    async for piece in answer.content.iter_any():
        found += piece
        if len(found) > most:
            raise aiohttp.ClientPayloadError(f"the answer is longer than {most} bytes")
    return bytes(found)
