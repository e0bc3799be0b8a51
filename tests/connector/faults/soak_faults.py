"""What the soak does to agents, servers and stored bytes; each fault begins, lasts, and is over."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from kvist_connector.testing.agent_process import AgentProcess
from kvist_connector.testing.fault_proxy import Answer, Cut, FaultProxy, Hang, Mode, Pass, Refuse, Spoil
from kvist_connector.testing.services import RedisProcess, S3Process

UNAVAILABLE = Answer("503 Service Unavailable", b"<Error><Code>SlowDown</Code></Error>")
DENIED = Answer("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>")
Fault = Callable[["World", random.Random], Awaitable[Callable[[], Awaitable[None]] | None]]


class World:
    """Everything that can be broken."""

    def __init__(
        self,
        folder: Path,
        redis: RedisProcess,
        s3: S3Process,
        redis_proxy: FaultProxy,
        s3_proxy: FaultProxy,
        peer_ports: dict[str, int],
        peer_proxies: dict[str, FaultProxy],
    ) -> None:
        self.folder = folder
        self.redis = redis
        self.s3 = s3
        self.proxies = {"redis": [redis_proxy], "s3": [s3_proxy], "peer": list(peer_proxies.values())}
        self.peer_ports, self.peer_proxies = peer_ports, peer_proxies
        self.agents: dict[str, AgentProcess] = {}
        self.up: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.engines: list[Callable[[], Awaitable[None]]] = []

    async def start(self, name: str) -> None:
        """One agent, on the arena and disk that it had before."""
        folder = self.folder / name
        settings = {
            "memory": "1200Ki",
            "disk__path": folder / "disk",
            "disk__size": "3Mi",
            "redis__urls": f"redis://127.0.0.1:{self.proxies['redis'][0].port}/0",
            "redis__lookup_deadline": 0.5,
            "redis__deadline": 1,
            "redis__pause": 0.2,
            "object_store__url": self.s3.url,
            "object_store__endpoint": f"http://127.0.0.1:{self.proxies['s3'][0].port}",
            "object_store__credentials_file": self.s3.credentials_file,
            "object_store__region": "us-east-1",
            "object_store__lookup_deadline": 0.5,
            "object_store__deadline": 2,
            "object_store__pause": 0.2,
            "peer__host": "127.0.0.1",
            "peer__port": self.peer_ports[name],
            "peer__urls": ",".join(
                f"http://127.0.0.1:{proxy.port}"
                for other, proxy in self.peer_proxies.items()
                if other != name
            ),
            "peer__lookup_deadline": 0.5,
            "peer__deadline": 1,
            "peer__pause": 0.2,
            "lookup_deadline": 5,
            "shutdown_deadline": 1,
        }
        self.agents[name] = await AgentProcess.start(folder, **settings)
        self.up[name].set()

    def files(self) -> list[Path]:
        """All chunks on disks and in the bucket."""
        found = [path for name in self.agents for path in (self.folder / name / "disk").glob("??/*.kvist")]
        return found + [path for path in (self.s3.folder / "chunks").rglob("*") if len(path.name) == 32]


def proxied(which: str, mode: Mode) -> Fault:
    async def begin(world: World, draw: random.Random) -> Callable[[], Awaitable[None]]:
        for proxy in world.proxies[which]:
            proxy.turn(mode)

        async def end() -> None:
            for proxy in world.proxies[which]:
                proxy.turn(Pass())

        return end

    return begin


async def redis_killed(world: World, draw: random.Random) -> Callable[[], Awaitable[None]]:
    await world.redis.kill()
    return world.redis.start


async def redis_full(world: World, draw: random.Random) -> Callable[[], Awaitable[None]] | None:
    if not world.redis.running:
        return None  # its being killed is the other fault of this time
    async with Redis(port=world.redis.port) as client:
        await client.config_set("maxmemory", 1)

    async def end() -> None:
        async with Redis(port=world.redis.port) as client:
            await client.config_set("maxmemory", 0)

    return end


async def redis_spoiled(world: World, draw: random.Random) -> None:
    if not world.redis.running:
        return
    async with Redis(port=world.redis.port) as client:
        names = [name async for name in client.scan_iter("kvist:*")]
        for name in draw.sample(names, min(5, len(names))):
            value = await client.get(name)
            if value:
                with suppress(OutOfMemoryError):  # its being full is the other fault of this time
                    await client.set(name, spoiled(value, draw))


async def files_spoiled(world: World, draw: random.Random) -> None:
    files = await asyncio.to_thread(world.files)
    for path in draw.sample(files, min(8, len(files))):
        await asyncio.to_thread(spoil, path, draw)


def spoil(path: Path, draw: random.Random) -> None:
    """In one step, as a disk does not: a file that is being read must not look like another fault."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    temporary = path.with_name("spoiled")
    temporary.write_bytes(spoiled(data, draw))
    temporary.rename(path)


def spoiled(data: bytes, draw: random.Random) -> bytes:
    """A byte flipped, or the end cut off."""
    place = draw.randrange(len(data))
    if draw.random() < 0.3:
        return data[:place]
    changed = bytearray(data)
    changed[place] ^= draw.randint(1, 255)
    return bytes(changed)


def agent_ended(number: signal.Signals) -> Fault:
    async def begin(world: World, draw: random.Random) -> Callable[[], Awaitable[None]]:
        name = draw.choice(sorted(world.agents))
        world.up[name].clear()
        status = await world.agents[name].terminate(number)
        assert status in (0, -number), f"the agent ended with {status}"

        async def end() -> None:
            await world.start(name)

        return end

    return begin


async def engine_killed(world: World, draw: random.Random) -> None:
    await draw.choice(world.engines)()


async def no_descriptors(world: World, draw: random.Random) -> Callable[[], Awaitable[None]]:
    pid = world.agents[draw.choice(sorted(world.agents))].pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # Engines that come meanwhile could not connect: a few are left.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + 1, before[1]))

    async def end() -> None:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    return end


async def disk_gone(world: World, draw: random.Random) -> Callable[[], Awaitable[None]]:
    """Its folders cannot be written to nor listed: root may, so they are files for a while."""
    disk = world.folder / draw.choice(sorted(world.agents)) / "disk"
    await asyncio.to_thread(disk.rename, disk.with_name("away"))
    await asyncio.to_thread(disk.write_text, "")

    async def end() -> None:
        await asyncio.to_thread(disk.unlink)
        await asyncio.to_thread(disk.with_name("away").rename, disk)

    return end


async def memory_cleared(world: World, draw: random.Random) -> None:
    agent = world.agents[draw.choice(sorted(world.agents))]
    await agent.post("/v1/kvist/clear", {"tier": "memory"})


FAULTS: dict[str, Fault] = {
    "Redis killed": redis_killed,
    "Redis full": redis_full,
    "Redis hangs": proxied("redis", Hang()),
    "Redis refuses": proxied("redis", Refuse()),
    "Redis breaks off": proxied("redis", Cut(after=9000)),
    "bytes in Redis spoiled": redis_spoiled,
    "S3 503": proxied("s3", UNAVAILABLE),
    "S3 denies": proxied("s3", DENIED),
    "S3 hangs": proxied("s3", Hang()),
    "S3 breaks off": proxied("s3", Cut(after=9000)),
    "files spoiled": files_spoiled,
    "disk gone": disk_gone,
    "no descriptors": no_descriptors,
    "agent killed": agent_ended(signal.SIGKILL),
    "agent stopped": agent_ended(signal.SIGTERM),
    "engine killed": engine_killed,
    "memory cleared": memory_cleared,
    "peers hang": proxied("peer", Hang()),
    "peers refuse": proxied("peer", Refuse()),
    "peers break off": proxied("peer", Cut(after=9000)),
    "peers lie": proxied("peer", Spoil(at=9000)),
}
