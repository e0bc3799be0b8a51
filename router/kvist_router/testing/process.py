"""The router as a process of its own, and how much memory it has."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil

from kvist_connector.testing.ports import free_port
from kvist_router.testing.faults import page
from kvist_router.testing.patience import patient_flags

SECONDS = 180.0  # three Python processes start, on a machine that may be busy


@asynccontextmanager
async def router(*flags: str) -> AsyncIterator[tuple[psutil.Process, str]]:
    """A router process that is ready, and its URL; the flags name its replicas."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    given = ["--port", str(port), "--admin-port", "0", "--log-level", "error", *patient_flags(flags)]
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvist_router", *given)
    try:
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as http:
            while not await _ready(http, url):
                if child.returncode is not None:
                    raise RuntimeError(f"the router ended with {child.returncode}")
                await asyncio.sleep(0.02)
        yield psutil.Process(child.pid), url
    finally:
        if child.returncode is None:
            child.terminate()
            try:
                await asyncio.wait_for(child.wait(), SECONDS)
            finally:
                if child.returncode is None:
                    child.kill()


def family(process: psutil.Process) -> list[psutil.Process]:
    """It and its children."""
    return [process, *process.children(recursive=True)]


def memory(process: psutil.Process) -> int:
    """Bytes that the router has in memory now."""
    return sum(item.memory_info().rss for item in family(process))


def peak(process: psutil.Process) -> int:
    """Most bytes that each of its processes has had in memory, together."""
    return sum(_peak(item.pid) for item in family(process))


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


async def _ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        return await page(http, url, "/readyz") == 200
    except aiohttp.ClientError:
        return False
