"""The tiers that this machine has servers for, each with the plainest way to the same files and servers."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.agent_process import AgentProcess
from bench.raw_http import served
from bench.tier_ways import Downloads, Files, Kvist, ObjectClient, RedisClient, Way
from kvist_connector.testing import services
from kvist_connector.testing.fake_engine import FakeEngine, content, layout, prompt_keys
from kvist_connector.testing.ports import free_port
from kvist_connector.tiers import direct
from kvist_connector.tiers.base import ChunkStore
from kvist_connector.tiers.deadline import DeadlineStore
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import EnvelopeStore
from kvist_connector.tiers.header import HEADER_BYTES
from kvist_connector.tiers.metered import MeteredStore
from kvist_connector.tiers.object_backend import Bucket, open_backend
from kvist_connector.tiers.object_store import ObjectStore
from kvist_connector.tiers.peer import PeerStore
from kvist_connector.tiers.peer_http import HttpTransfer
from kvist_connector.tiers.redis import RedisStore
from kvist_connector.tiers.redis_server import RedisServer

LAYERS: Final = 30
LAYER_BYTES: Final = 8 * 24_576
CHUNKS: Final = 16
CHUNK_BYTES: Final = LAYERS * LAYER_BYTES
AT_ONCE: Final = 8
_THREADS: Final = 4  # as many as an agent has for its disk
_PEER_FINGERPRINT: Final = b"f" * 32


@dataclass(frozen=True)
class Tier:
    """Ours and the plain way; `keys` are there already where nothing is written, and `anew` puts them there
    again: what their owner has found out about them is forgotten."""

    name: str
    ours: Way
    plain: Way
    port: int = 0
    keys: Sequence[bytes] = field(default=())
    anew: Callable[[], Awaitable[None]] | None = None

    @property
    def writable(self) -> bool:
        """Whether it takes chunks."""
        return not self.keys


async def tiers(folder: Path, stack: AsyncExitStack, only: Sequence[str] | None) -> list[Tier]:
    """Those that are here, or of them those that are asked for; they end with the stack."""
    threads = stack.enter_context(ThreadPoolExecutor(_THREADS))
    makers: dict[str, Callable[[Path, AsyncExitStack, ThreadPoolExecutor], Awaitable[Tier]]] = {
        "disk": _buffered,
        "disk, checked": _checked,
        "disk, direct": _direct,
        "redis": _redis,
        "s3": _s3,
        "peer": _peer,
    }
    here = {
        "disk, direct": direct.is_possible(folder),
        "redis": services.redis_binary() is not None,
        "s3": services.s3_binary() is not None,
    }
    found = []
    for name, make in makers.items():
        if here.get(name, True) and (not only or name in only):
            tier = await make(folder, stack, threads)
            stack.push_async_callback(tier.ours.close)
            stack.push_async_callback(tier.plain.close)
            found.append(tier)
    return found


def _wrapped(store: ChunkStore, threads: ThreadPoolExecutor) -> EnvelopeStore:
    limited = DeadlineStore(store, 60.0, most=AT_ONCE)
    return EnvelopeStore(MeteredStore(limited, lambda *figures: None), threads)


async def _buffered(folder: Path, stack: AsyncExitStack, threads: ThreadPoolExecutor) -> Tier:
    return await _files("disk", folder, threads)


async def _checked(folder: Path, stack: AsyncExitStack, threads: ThreadPoolExecutor) -> Tier:
    return await _files("disk, checked", folder, threads, checked=True)


async def _direct(folder: Path, stack: AsyncExitStack, threads: ThreadPoolExecutor) -> Tier:
    return await _files("disk, direct", folder, threads, past=True)


async def _files(
    name: str, folder: Path, threads: ThreadPoolExecutor, past: bool = False, checked: bool = False
) -> Tier:
    place = folder / name
    store = await DiskStore.open(place / "kvist", 1 << 40, "none", threads, direct=past)
    (place / "plain").mkdir()
    return Tier(name, Kvist(_wrapped(store, threads)), Files(place / "plain", past, threads, checked))


async def _redis(folder: Path, stack: AsyncExitStack, threads: ThreadPoolExecutor) -> Tier:
    server = services.RedisProcess(folder / "redis")
    await server.start()
    stack.push_async_callback(server.stop)
    store = RedisStore(RedisServer(server.url, connections=AT_ONCE + 4))
    return Tier("redis", Kvist(_wrapped(store, threads)), RedisClient(server.url, AT_ONCE), server.port)


async def _s3(folder: Path, stack: AsyncExitStack, threads: ThreadPoolExecutor) -> Tier:
    server = services.S3Process(folder / "s3")
    await server.start()
    stack.push_async_callback(server.stop)
    bucket = Bucket(server.url, endpoint=server.endpoint, credentials_file=server.credentials_file)
    store = ObjectStore(open_backend(bucket), server.url, threads)
    return Tier("s3", Kvist(_wrapped(store, threads)), ObjectClient(open_backend(bucket)))


async def _peer(folder: Path, stack: AsyncExitStack, threads: ThreadPoolExecutor) -> Tier:
    """Another agent whose engine has computed the chunks."""
    port = free_port()
    (folder / "peer").mkdir()
    more = ("--peer.host", "127.0.0.1", "--peer.port", str(port))
    agent = stack.enter_context(
        AgentProcess(folder / "peer", memory=str(2 * CHUNKS * CHUNK_BYTES), more=more)
    )
    engine = await FakeEngine.start(
        agent.socket, layout(_PEER_FINGERPRINT, layers=LAYERS, layer_bytes=LAYER_BYTES, blocks=8)
    )
    stack.push_async_callback(engine.stop)
    keys = prompt_keys(range(8 * CHUNKS), _PEER_FINGERPRINT)

    async def anew() -> None:
        agent.clear("memory")
        await engine.store(keys)
        await engine.lookup(keys)

    await anew()
    file = (
        Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvist-bench-", dir="/dev/shm"))) / "raw"
    )
    file.write_bytes(b"".join(bytes(HEADER_BYTES) + content(key, 0, CHUNK_BYTES) for key in keys))
    raw = stack.enter_context(served(file, HEADER_BYTES + CHUNK_BYTES))
    transfer = HttpTransfer(f"http://127.0.0.1:{port}", None, AT_ONCE + 1, 60.0)
    return Tier(
        "peer",
        Kvist(_wrapped(PeerStore(transfer), threads), _PEER_FINGERPRINT),
        Downloads(raw, AT_ONCE, stack.enter_context(ThreadPoolExecutor(AT_ONCE)), keys),
        keys=keys,
        anew=anew,
    )
