"""Which member of a Redis Cluster has which slots, as one of them tells it. Used by `redis_cluster`."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from kvist_connector.errors import TierError
from kvist_connector.tiers.redis_server import RedisServer, close_pool, explain, open_pool


@dataclass(frozen=True)
class Slots:
    """Ranges in ascending order: first slot, last slot, URL of the primary."""

    firsts: tuple[int, ...] = ()
    lasts: tuple[int, ...] = ()
    urls: tuple[str, ...] = ()

    def url(self, slot: int) -> str | None:
        """The primary's; None when nobody has the slot."""
        found = bisect_right(self.firsts, slot) - 1
        return self.urls[found] if found >= 0 and slot <= self.lasts[found] else None

    @property
    def whole(self) -> bool:
        """Whether every slot has somebody."""
        return sum(self.lasts) - sum(self.firsts) + len(self.firsts) == REDIS_CLUSTER_HASH_SLOTS


async def ask_slots(server: RedisServer) -> Slots:
    """What this member says, over a connection of its own; TierError in words."""
    pool = open_pool(server)
    try:
        async with asyncio.timeout(server.connect_timeout):
            client = Redis(connection_pool=pool)
            answer: Any = await client.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            return parse_slots(answer, server.url)
    except TimeoutError as error:
        raise TierError(f"{server.label}: no answer within {server.connect_timeout:g} s") from error
    except Exception as error:
        # The boundary to the client library, which reads a server's nonsense with any error there is.
        raise TierError(f"{server.label}: {explain(error, server)}") from error
    finally:
        await close_pool(pool)


def parse_slots(answer: Sequence[Sequence[Any]], asked: str) -> Slots:
    """Of [first slot, last slot, [host, port, ...] of the primary, replicas ...] for each range."""
    ranges = sorted(
        (int(first), int(last), url_of(asked, primary[0], primary[1])) for first, last, primary, *_ in answer
    )
    return Slots(*(tuple(column) for column in zip(*ranges, strict=True)))


def url_of(asked: str, host: str | bytes | None, port: int) -> str:
    """The address asked with this host and port; a host that is not told is the same one."""
    parts = urlsplit(asked)
    host = host.decode() if isinstance(host, bytes) else host
    host = host or parts.hostname or ""
    user = f"{parts.username}@" if parts.username else ""
    return urlunsplit(parts._replace(netloc=f"{user}{f'[{host}]' if ':' in host else host}:{port}"))
