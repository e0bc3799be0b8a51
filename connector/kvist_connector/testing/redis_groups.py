"""Groups of real Redis servers for tests: a primary with replicas that Sentinels watch, and a Redis Cluster.

Every server is a process of `services`; what becomes of one that is killed, paused or started
again is Redis's own doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvist_connector.testing.ports import free_port
from kvist_connector.testing.services import START_SECONDS, RedisProcess, Server, redis_binary

PRIMARY: Final = "chunks"
# Milliseconds until one that does not answer is taken for lost.
_LOST_AFTER: Final = "1000"


class SentinelProcess(Server):
    """One Sentinel that decides alone: a quorum of one."""

    def __init__(
        self, folder: Path, primary: RedisProcess, password: str = "", primary_password: str = ""
    ) -> None:
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "sentinel.conf"
        # It rewrites the file itself, so this cannot be given as options.
        path.write_text(
            f"bind 127.0.0.1\nport {self.port}\ndir {folder}\n"
            f"sentinel monitor {PRIMARY} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {PRIMARY} {_LOST_AFTER}\n"
            f"sentinel failover-timeout {PRIMARY} 4000\n"
            + (f"requirepass {password}\n" if password else "")
            + (f"sentinel auth-pass {PRIMARY} {primary_password}\n" if primary_password else "")
        )
        super().__init__([str(redis_binary()), str(path), "--sentinel"], b"+monitor")

    @property
    def url(self) -> str:
        """For `redis.urls` beside `redis.sentinel`."""
        return f"redis://127.0.0.1:{self.port}/0"


class ClusterMember(RedisProcess):
    """A server with cluster mode on; `join` makes several of them a cluster."""

    def __init__(self, folder: Path, port: int | None = None, bus: int | None = None, **options: str) -> None:
        self.bus = free_port() if bus is None else bus
        cluster = {
            "cluster_enabled": "yes",
            "cluster_port": str(self.bus),
            "cluster_node_timeout": _LOST_AFTER,
            # The other members' slots are served while one is lost.
            "cluster_require_full_coverage": "no",
        }
        super().__init__(folder, port, **(cluster | options))

    async def ask(self, *command: str | int) -> Any:
        """The answer of this member."""
        return await ask(self.port, *command)


async def ask(port: int, *command: str | int) -> Any:
    """The answer of the server at this port."""
    async with Redis(host="127.0.0.1", port=port, decode_responses=True) as client:
        answer: Any = await client.execute_command(*command)  # type: ignore[no-untyped-call]
        return answer


async def join(primaries: list[ClusterMember], replicas: dict[int, ClusterMember] | None = None) -> None:
    """Returns when all agree; `replicas` by the position of their primary."""
    share, slots = 16384 // len(primaries), 16384
    for number, member in enumerate(primaries):
        last = slots - 1 if number == len(primaries) - 1 else (number + 1) * share - 1
        await member.ask("CLUSTER", "ADDSLOTSRANGE", number * share, last)
    members = [*primaries, *(replicas or {}).values()]
    for number, member in enumerate(members):
        await member.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for member in members[1:]:
        await member.ask("CLUSTER", "MEET", "127.0.0.1", members[0].port, members[0].bus)
    for member in members:
        await until(partial(agreed, member, len(members)))
    for position, replica in (replicas or {}).items():
        primary = await primaries[position].ask("CLUSTER", "MYID")
        await until(partial(_follows, replica, primary))
        await until(partial(replicates, replica.port))


async def agreed(member: ClusterMember, count: int) -> bool:
    """Whether this member knows so many, itself included, and the cluster works."""
    known = await member.ask("CLUSTER", "INFO")
    text = known if isinstance(known, dict) else dict(line.split(":") for line in known.split())
    return text["cluster_state"] == "ok" and int(text["cluster_known_nodes"]) == count


async def _follows(replica: ClusterMember, primary: str) -> bool:
    await replica.ask("CLUSTER", "REPLICATE", primary)
    return True


async def replicates(port: int) -> bool:
    """Whether this server is a replica that is in step with its primary."""
    role = await ask(port, "ROLE")
    return bool(role[0] == "slave" and role[3] == "connected")


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Returns when the check holds; a server that does not answer yet does not hold."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                if await check():
                    return
            except (RedisError, OSError):
                pass
            await asyncio.sleep(0.05)
