"""Lower tiers through the envelope, against the plainest way to move the same bytes to the same server.

    python -m bench.tiers [--json FILE] [--check] [--quick]

Sixteen chunks of SmolLM2-135M (5.9 MB each, 94 MB) are put and got, as many at a time as an agent does:
header, checksum, breaker and metering included. The peers run in threads and do nothing else: plain
files for disk, for Redis a blocking socket that sends SET and receives GET into the buffer, for S3
http.client with presigned addresses. The other figure is how long the event loop was held at worst:
the lookups of all requests wait for it.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, Protocol

import obstore
from obstore.store import S3Store

from bench import harness
from bench.harness import Goal, Options, Result, Table, estimate
from kvist_connector.testing import services
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import EnvelopeStore
from kvist_connector.tiers.metered import MeteredStore
from kvist_connector.tiers.object_backend import Bucket, open_backend
from kvist_connector.tiers.object_store import ObjectStore
from kvist_connector.tiers.redis import RedisStore
from kvist_connector.tiers.redis_server import RedisServer

CHUNKS, CHUNK_BYTES, AT_ONCE, PEERS = 16, 30 * 8 * 24_576, 8, 4
FINGERPRINT = b"b" * 32
GOAL, STALL_GOAL = 0.5, 0.02


class Peer(Protocol):
    """Moves one named chunk; called from several threads."""

    def put(self, name: str, data: memoryview) -> None:
        """Store it."""

    def get(self, name: str, into: memoryview) -> None:
        """Fill the buffer."""


@dataclass(frozen=True)
class Tier:
    """A store and its peer."""

    name: str
    store: EnvelopeStore
    peer: Peer


class Files:
    """Plain files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, data: memoryview) -> None:
        """See Peer."""
        (self._folder / name).write_bytes(data)

    def get(self, name: str, into: memoryview) -> None:
        """See Peer."""
        with (self._folder / name).open("rb", buffering=0) as file:
            position = 0
            while count := file.readinto(into[position:]):
                position += count


class RawRedis:
    """A connection a call; nothing is parsed but the length."""

    def __init__(self, port: int) -> None:
        self._port = port

    def put(self, name: str, data: memoryview) -> None:
        """See Peer."""
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            head = f"*3\r\n$3\r\nSET\r\n${len(name)}\r\n{name}\r\n${len(data)}\r\n"
            connection.sendall(head.encode())
            connection.sendall(data)
            connection.sendall(b"\r\n")
            connection.recv(16)

    def get(self, name: str, into: memoryview) -> None:
        """See Peer."""
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(f"*2\r\n$3\r\nGET\r\n${len(name)}\r\n{name}\r\n".encode())
            connection.recv(len(f"${len(into)}\r\n"), socket.MSG_WAITALL)
            connection.recv_into(into, len(into), socket.MSG_WAITALL)


class RawS3:
    """Presigned requests."""

    def __init__(self, server: services.S3Process) -> None:
        self._server = server
        backend = open_backend(_bucket(server))
        assert isinstance(backend, S3Store)
        self._backend = backend

    def put(self, name: str, data: memoryview) -> None:
        """See Peer."""
        self._request("PUT", name, data).read()

    def get(self, name: str, into: memoryview) -> None:
        """See Peer."""
        answer, position = self._request("GET", name, None), 0
        while count := answer.readinto(into[position:]):
            position += count

    def _request(
        self, method: Literal["GET", "PUT"], name: str, body: memoryview | None
    ) -> http.client.HTTPResponse:
        url = obstore.sign(self._backend, method, name, timedelta(minutes=5))
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port)
        connection.request(method, "/" + url.split("/", 3)[3], body)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{method} {name}: status {answer.status}")
        return answer


def _bucket(server: services.S3Process) -> Bucket:
    return Bucket(server.url, endpoint=server.endpoint, credentials_file=server.credentials_file)


@asynccontextmanager
async def tiers(folder: Path, threads: ThreadPoolExecutor) -> AsyncIterator[list[Tier]]:
    """Those that this machine has the servers for."""

    def wrapped(store: ChunkStore) -> EnvelopeStore:
        limited = DeadlineStore(store, 60.0, most=AT_ONCE)
        return EnvelopeStore(MeteredStore(limited, lambda *figures: None), threads)

    (folder / "plain").mkdir()
    disk = await DiskStore.open(folder / "disk", 1 << 40, "none", threads)
    found = [Tier("disk", wrapped(disk), Files(folder / "plain"))]
    servers: list[services.Server] = []
    if services.redis_binary() is not None:
        redis = services.RedisProcess(folder / "redis")
        servers.append(redis)
        await redis.start()
        store = wrapped(RedisStore(RedisServer(redis.url, connections=AT_ONCE + 4)))
        found.append(Tier("redis", store, RawRedis(redis.port)))
    if services.s3_binary() is not None:
        s3 = services.S3Process(folder / "s3")
        servers.append(s3)
        await s3.start()
        found.append(Tier("s3", wrapped(ObjectStore(open_backend(_bucket(s3)), s3.url, threads)), RawS3(s3)))
    try:
        yield found
    finally:
        for tier in found:
            await tier.store.inner.close()
        for server in servers:
            await server.stop()


async def one_round(
    tier: Tier, round_: int, data: Sequence[memoryview], threads: ThreadPoolExecutor
) -> dict[str, float]:
    """Seconds of ours and the peer's, and the loop's worst stall during ours."""
    targets = [memoryview(bytearray(CHUNK_BYTES)) for _ in data]
    # Fresh keys in every round: a put of what is there would send nothing.
    keys = [bytes([round_, number]) * 8 for number in range(len(data))]
    seconds: dict[str, float] = {}

    async def ours() -> None:
        async with watched(seconds):
            seconds["put"] = await timed(
                tier.store.put_if_absent([view], fingerprint=FINGERPRINT, key=key, parent=bytes(16), index=0)
                for key, view in zip(keys, data, strict=True)
            )
            seconds["get"] = await timed(
                tier.store.get(FINGERPRINT, key, [target]) for key, target in zip(keys, targets, strict=True)
            )

    async def theirs() -> None:
        for name, call, buffers in (
            ("peer put", tier.peer.put, data),
            ("peer get", tier.peer.get, targets),
        ):
            began = time.perf_counter()
            work = [threads.submit(call, f"{round_}-{n}", buffer) for n, buffer in enumerate(buffers)]
            await asyncio.gather(*map(asyncio.wrap_future, work))
            seconds[name] = time.perf_counter() - began

    for work in (ours, theirs) if round_ % 2 else (theirs, ours):
        await work()
        if any(bytes(target) != bytes(view) for target, view in zip(targets, data, strict=True)):
            raise RuntimeError(f"{tier.name}: other bytes came back")
    return seconds


async def timed(work: Iterable[Awaitable[object]]) -> float:
    """Seconds until all of it is done."""
    began = time.perf_counter()
    await asyncio.gather(*work)
    return time.perf_counter() - began


@asynccontextmanager
async def watched(seconds: dict[str, float]) -> AsyncIterator[None]:
    """Writes the loop's worst lateness during the block."""
    loop = asyncio.get_running_loop()
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            due = loop.time() + 0.001
            await asyncio.sleep(0.001)
            worst = max(worst, loop.time() - due)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        seconds["stall"] = worst


async def measure(rounds: int) -> dict[str, list[dict[str, float]]]:
    """By tier, every round's figures."""
    data = [memoryview(bytes([number + 1]) * CHUNK_BYTES) for number in range(CHUNKS)]
    found: dict[str, list[dict[str, float]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder,
        ThreadPoolExecutor(4) as threads,
        ThreadPoolExecutor(PEERS) as peers,
    ):
        async with tiers(Path(folder), threads) as present:
            for round_ in range(rounds + 1):
                for tier in present:
                    seconds = await one_round(tier, round_, data, peers)
                    if round_:  # the first opens connections and touches pages
                        found.setdefault(tier.name, []).append(seconds)
    return found


def run(options: Options) -> Result:
    """Lower tiers against plain ways to the same servers."""
    found = asyncio.run(measure(options.rounds(7, 2)))
    size = CHUNKS * CHUNK_BYTES / 1e6
    rows, goals, figures = [], [], {}
    for name, rounds in found.items():
        cells = [name]
        for way in ("put", "get"):
            ratio = estimate([each[f"peer {way}"] / each[way] for each in rounds])
            speed = estimate([size / each[way] for each in rounds])
            peer = estimate([size / each[f"peer {way}"] for each in rounds])
            cells += [f"{speed.median:.0f}", f"{peer.median:.0f}", str(ratio)]
            figures[f"{name} {way} MB/s"] = speed.median
            interval = (ratio.low, ratio.high)
            goals.append(Goal(f"{name} {way} / peer", ratio.median, GOAL, at_least=True, interval=interval))
        stall = estimate([each["stall"] for each in rounds])
        figures[f"{name} loop stall ms"] = 1000 * stall.median
        goals.append(Goal(f"{name} loop stall", stall.median, STALL_GOAL, unit=" s"))
        rows.append((*cells, f"{1000 * stall.median:.1f}"))
    columns = ("tier", "put MB/s", "peer", "ratio", "get MB/s", "peer", "ratio", "loop held ms")
    note = f"{CHUNKS} chunks of {CHUNK_BYTES / 1e6:.1f} MB; ratio: our speed over the peer's, in pairs"
    table = Table("Lower tiers", columns, tuple(rows), note)
    headline = ", ".join(f"{key} {value:.0f}" for key, value in figures.items())
    missing = services.missing()
    return Result(headline, (table,), figures, tuple(goals), (missing,) if missing else ())


if __name__ == "__main__":
    sys.exit(harness.main("tiers", run))
