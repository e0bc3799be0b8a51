"""Minutes of all faults at once: memory stays where it was, nothing is left, the pages are true."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvist_connector.protocol.feed import FEED_VERSION, Opening
from kvist_connector.protocol.tiers import Tier
from kvist_router.testing.faults import CHAT, EVENTS, OK, RawEngine, Script, ask, page, reset, well
from kvist_router.testing.feed import FakeAgent
from kvist_router.testing.process import family, memory, router

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SOAK_SECONDS = float(os.environ.get("KVIST_SOAK_SECONDS", "600"))
CLIENTS = 12
MIB = 2**20
GROWTH = 48 * MIB  # after the first fifth of the time: caches are full by then
EVENT = b'10\r\ndata: {"n": 1}\n\r\n'
FLAGS = {
    "connect-seconds": "2", "decide-seconds": "10", "first-byte-seconds": "2", "idle-seconds": "2",
    "head-seconds": "2", "body-seconds": "5",
    "body-bytes": str(64 * MIB), "body-memory-bytes": str(MIB),
}  # fmt: skip


def says(data: bytes, end: str) -> Script:
    async def script(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if end == "hang":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.gone.wait(), 3)
            writer.close()
        elif end == "reset":
            await reset(writer)
        elif end == "close":
            writer.close()

    return script


SCRIPTS = [
    well, well, well,
    says(EVENTS + EVENT * 3 + b"0\r\n\r\n", "go on"),
    says(b"", "hang"), says(EVENTS + EVENT, "hang"), says(b"\0garbage\r\n\r\n", "close"),
    says(EVENTS + EVENT[:7], "close"), says(OK.replace(b": 2", b": 9"), "close"),
    says(EVENTS + EVENT, "reset"), says(b"", "reset"),
    says(b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno", "go on"),
]  # fmt: skip


class Soak:
    """What runs at the same time; `seen` counts how requests ended."""

    def __init__(self, url: str, engines: list[RawEngine], agents: list[FakeAgent], listed: Path) -> None:
        self.url, self.engines, self.agents, self.listed = url, engines, agents, listed
        self.draw = random.Random(11)
        self.seen: Counter[int] = Counter()
        self.over = asyncio.Event()

    async def pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds)

    async def talk(self, http: aiohttp.ClientSession) -> None:
        while not self.over.is_set():
            words = " ".join(str(self.draw.randrange(10**6)) for _ in range(self.draw.choice((5, 50, 2000))))
            body = {"model": "m", "messages": [{"role": "user", "content": words}], "stream": True}
            kind = self.draw.random()
            if kind < 0.1:
                await self.leave(json.dumps(body).encode())
            elif kind < 0.15:
                await self.bomb()
            else:
                if kind < 0.2:
                    picture = {"url": "x" * (4 * MIB)}
                    body["messages"] = [
                        {"role": "user", "content": [{"type": "image_url", "image_url": picture}]}
                    ]
                data = io.BytesIO(json.dumps(body).encode())
                status, _, _ = await ask(http, self.url, data=data)
                self.seen[status] += 1

    async def leave(self, body: bytes) -> None:
        sent = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        writer.write(sent[: self.draw.randrange(len(sent) + 1)])
        await self.pause(self.draw.random() / 10)
        writer.transport.abort()

    async def bomb(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        writer.write(
            self.draw.choice((b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, b"\0" * 99, b"POST / HT"))
        )
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(reader.read(), 5)
        writer.transport.abort()

    async def break_engines(self) -> None:
        while not self.over.is_set():
            for engine in self.engines:
                engine.script = self.draw.choice(SCRIPTS)
            self.draw.choice(self.engines).silent = self.draw.random() < 0.3
            await self.pause(self.draw.uniform(0.2, 1))
            for engine in self.engines:
                engine.silent = False

    async def flood(self) -> None:
        while not self.over.is_set():
            for agent in self.agents:
                with contextlib.suppress(asyncio.QueueFull):  # a reader that is gone
                    for _ in range(10):
                        agent.delta(Tier.MEMORY, [self.draw.randbytes(16) for _ in range(50)])
                    if self.draw.random() < 0.02:
                        agent.end()
                    elif self.draw.random() < 0.02:
                        agent.raw(b"\xff" * 64)
            await self.pause(0.1)

    async def flap(self) -> None:
        while not self.over.is_set():
            self.list(self.draw.sample(range(len(self.engines)), self.draw.choice((1, 2, 3))))
            await self.pause(self.draw.uniform(1, 5))
        self.list(range(len(self.engines)))

    def list(self, which: Any) -> None:
        new = self.listed.with_suffix(".new")
        new.write_text(
            json.dumps(
                [{"name": f"r{n}", "url": self.engines[n].url, "agent": self.agents[n].url} for n in which]
            )
        )
        new.rename(self.listed)


def opening(name: str) -> Opening:
    return Opening(
        version=FEED_VERSION, epoch=1, replica=name, fingerprint=b"f" * 32, group=0, model="m",
        chunk_tokens=256, block_tokens=32, gpu_known=False, draining=False,
    )  # fmt: skip


async def test_memory_stays_and_nothing_is_left_after_minutes_of_faults(tmp_path: Path) -> None:
    listed = tmp_path / "replicas.yaml"
    flags = [word for name, value in FLAGS.items() for word in (f"--limits.{name}", value)]
    flags += [
        "--index.max-keys",
        "20000",
        "--health.interval-seconds",
        "0.5",
        "--health.timeout-seconds",
        "1",
    ]
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(RawEngine()) for _ in range(3)]
        agents = [await stack.enter_async_context(FakeAgent(opening(f"r{n}"))) for n in range(3)]
        soak = Soak("", engines, agents, listed)
        soak.list(range(3))
        process, soak.url = await stack.enter_async_context(router("--replicas-file", str(listed), *flags))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        sizes: list[int] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(soak.talk(http))
            for other in (soak.break_engines, soak.flood, soak.flap):
                group.create_task(other())
            for _ in range(10):
                await asyncio.sleep(SOAK_SECONDS / 10)
                sizes.append(memory(process))
                assert await page(http, soak.url, "/healthz") == 200
            soak.over.set()
        for engine in engines:
            engine.script, engine.silent = well, False
        print(f"memory in MiB: {[size // MIB for size in sizes]}, answers: {dict(soak.seen)}")
        assert max(sizes[2:]) - max(sizes[:2]) < GROWTH
        assert set(soak.seen) <= {200, 500, 502, 503, 504, 0}
        assert soak.seen[200] > 10
        async with asyncio.timeout(60):
            while await page(http, soak.url, "/readyz") != 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
            while "kvist_router_in_flight_requests 0.0" not in await text(http, soak.url + "/metrics"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert {(await ask(http, soak.url))[0] for _ in range(20)} == {200}
        files = [file.path for item in family(process) for file in item.open_files()]
        assert not [path for path in files if "deleted" in path]


async def text(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(url) as answer:
        return await answer.text()
