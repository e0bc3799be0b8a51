"""Long bodies and little memory: a router as a process, and what it takes of the machine."""

from __future__ import annotations

import asyncio
import json
import resource

import aiohttp
import pytest

from kvist_router.testing.faults import ASKED, CHAT, RawEngine, ask, page
from kvist_router.testing.process import family, peak, router

MIB = 2**20
LONG = 100 * MIB
LITTLE = 8 * MIB  # of memory for a body: what is read ahead, written and sent on
PIECE = b"iVBORw0K" * 2**15


def parts(size: int) -> tuple[bytes, bytes]:
    """What comes before a picture of so many bytes, and after it."""
    picture = [{"type": "image_url", "image_url": {"url": "?"}}]
    body = json.dumps({**ASKED, "messages": [{"role": "user", "content": picture}]}).encode()
    before, after = body.split(b"?")
    length = len(before) + size + len(after)
    return f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode() + before, after


async def send(url: str, size: int) -> bytes:
    """The answer to a body with a picture of so many bytes; empty when the connection broke."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    before, after = parts(size)
    try:
        writer.write(before)
        for _ in range(size // len(PIECE)):
            writer.write(PIECE)
            await writer.drain()
        writer.write(after)
        return await reader.readuntil(b"\r\n\r\n")
    except (ConnectionError, asyncio.IncompleteReadError):
        return b""
    finally:
        writer.transport.abort()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("count", "size"), [(4, 24 * MIB), pytest.param(8, LONG, marks=pytest.mark.full)])
async def test_many_long_bodies_at_once_are_in_files_not_in_memory(count: int, size: int) -> None:
    flags = ["--limits.body-bytes", str(2 * LONG), "--limits.body-seconds", "600"]
    async with RawEngine() as engine, router("--replica", engine.url, *flags) as (process, url):
        assert (await send(url, size)).startswith(b"HTTP/1.1 200")  # whatever is loaded, is
        before = peak(process)
        answers = await asyncio.gather(*(send(url, size) for _ in range(count)))
        assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * count
        assert peak(process) - before < count * LITTLE
        assert engine.asked == count + 1
        files = [file.path for item in family(process) for file in item.open_files()]
        assert not [path for path in files if "deleted" in path]


@pytest.mark.skipif(
    not hasattr(resource, "prlimit"), reason="limits of other processes can be set on Linux only"
)
async def test_where_memory_is_short_requests_fail_and_the_router_lives() -> None:
    flags = ["--limits.body-bytes", str(LONG), "--limits.body-memory-bytes", str(48 * MIB)]
    flags += ["--limits.bodies-memory-bytes", str(2**40)]
    async with (
        RawEngine() as engine,
        router("--replica", engine.url, *flags) as (process, url),
        aiohttp.ClientSession() as http,
    ):
        assert (await send(url, MIB)).startswith(b"HTTP/1.1 200")
        for item in family(process):
            room = item.memory_info().vms + 128 * MIB
            resource.prlimit(item.pid, resource.RLIMIT_AS, (room, room))
        answers = await asyncio.gather(*(send(url, 40 * MIB) for _ in range(8)))
        failed = [answer for answer in answers if not answer.startswith(b"HTTP/1.1 200")]
        assert failed  # or the limit was none
        assert process.is_running()
        assert await page(http, url, "/healthz") == 200
        assert await page(http, url, "/readyz") == 200
        assert await ask(http, url) == (200, b"{}", True)
        async with http.get(url + "/metrics") as answer:
            assert "kvist_router_in_flight_requests 0.0" in await answer.text()
