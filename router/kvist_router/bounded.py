"""Answers of engines, agents and the API server, read up to a bound: endless ones must not fill the memory.

Called by whoever asks off the hot path: health checks, controls, questions for tokens, discovery.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp


async def body_of(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body; raises aiohttp.ClientPayloadError when it has more than `most` bytes."""
    found = bytearray()
    _check("answer", answer.content_length or 0, most)
    async for piece in answer.content.iter_any():
        found += piece
        _check("answer", len(found), most)
    return bytes(found)


async def lines_of(answer: aiohttp.ClientResponse, most: int) -> AsyncIterator[bytes]:
    """Each line as it comes; raises aiohttp.ClientPayloadError when one has more than `most` bytes."""
    rest = bytearray()
    async for piece in answer.content.iter_any():
        *lines, end = piece.split(b"\n")
        for line in lines:
            yield bytes(rest + line)
            rest.clear()
        rest += end
        _check("line", len(rest), most)


def _check(what: str, size: int, most: int) -> None:
    if size > most:
        raise aiohttp.ClientPayloadError(f"the {what} is longer than {most} bytes")
