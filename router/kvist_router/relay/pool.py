"""Connections to engines, kept alive between requests. Called by upstream.py.

Every connection, idle or not, takes one of `limit` places; who finds none free closes the idle
connection that waits longest, or waits for a place until the connect deadline.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass, field

from kvist_router.errors import UpstreamError
from kvist_router.relay.connection import Connection

IDLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an engine listens."""

    base: str
    host: str
    port: int
    tls: bool
    host_header: bytes
    prefix: bytes


@dataclass(slots=True, eq=False)
class _Waiting:
    """Someone who waits for a place: the future gives a connection, or None for a place to connect in."""

    base: str
    fresh: bool
    turn: asyncio.Future[Connection | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Pool:
    """`acquire`, and in every case `release`."""

    def __init__(
        self,
        limit: int,
        connect_seconds: float,
        idle_seconds: float = IDLE_SECONDS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limit = limit
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._tls = tls
        self._places = 0
        self._open: set[Connection] = set()
        self._idle: dict[str, dict[Connection, float]] = {}  # newest last
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self._places

    async def acquire(self, origin: Origin, fresh: bool = False) -> Connection:
        """An idle connection, unless it must be fresh, or a new one; raises UpstreamError."""
        idle = None if fresh else self._idle.get(origin.base)
        if idle:
            kept, _ = idle.popitem()
            if not idle:
                del self._idle[origin.base]
            return kept
        if self._places >= self._limit:
            self._close_longest_idle()
        if self._places < self._limit:
            self._places += 1
        elif (handed := await self._turn(origin.base, fresh)) is not None:
            return handed
        connection: Connection | None = None
        try:
            connection = await self._connect(origin)
            self._open.add(connection)
            return connection
        finally:
            if connection is None:
                self._free_place()

    def release(self, connection: Connection) -> None:
        """Keep the connection if its answer was read to the end, else close it at once."""
        if not connection.rest():
            self._close(connection)
            return
        if (waiting := self._next_waiting()) is None:
            now = asyncio.get_running_loop().time()
            self._idle.setdefault(connection.base, {})[connection] = now
            if self._timer is None:
                self._expire()
        elif waiting.base == connection.base and not waiting.fresh:
            waiting.turn.set_result(connection)
        else:
            self._open.discard(connection)
            connection.abort()
            waiting.turn.set_result(None)

    def lost(self, connection: Connection) -> None:
        """The engine closed a connection that nobody uses."""
        idle = self._idle.get(connection.base)
        if idle is not None and idle.pop(connection, None) is not None:
            if not idle:
                del self._idle[connection.base]
            self._close(connection)

    async def close(self) -> None:
        """Close all connections."""
        if self._timer is not None:
            self._timer.cancel()
        self._idle.clear()
        for connection in tuple(self._open):
            self._close(connection)
        await asyncio.sleep(0)  # transports end in the loop's next round

    async def _connect(self, origin: Origin) -> Connection:
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(
                    lambda: Connection(origin.base, self),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except TimeoutError as error:
            raise UpstreamError("no connection in time", unreachable=True) from error
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UpstreamError(f"cannot connect: {reason}", unreachable=True) from error
        return connection

    async def _turn(self, base: str, fresh: bool) -> Connection | None:
        waiting, mine = _Waiting(base, fresh), False
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._connect_seconds):
                handed = await waiting.turn
            mine = True
        except TimeoutError as error:
            raise UpstreamError(f"no free connection in time, limit {self._limit}") from error
        finally:
            if not mine:
                self._withdraw(waiting)
        return handed

    def _withdraw(self, waiting: _Waiting) -> None:
        """What came to someone who waits no longer goes to the next."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        if waiting.turn.done() and not waiting.turn.cancelled():
            handed = waiting.turn.result()
            if handed is None:
                self._free_place()
            else:
                self.release(handed)

    def _next_waiting(self) -> _Waiting | None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.turn.done():
                return waiting
        return None

    def _free_place(self) -> None:
        waiting = self._next_waiting()
        if waiting is None:
            self._places -= 1
        else:
            waiting.turn.set_result(None)

    def _close(self, connection: Connection) -> None:
        connection.abort()
        if connection in self._open:
            self._open.discard(connection)
            self._free_place()

    def _close_longest_idle(self) -> None:
        oldest = [(since, connection) for idle in self._idle.values() for connection, since in _first(idle)]
        if oldest:
            self.lost(min(oldest, key=lambda pair: pair[0])[1])

    def _expire(self) -> None:
        """Close what was idle for too long; again when the next one is due."""
        loop = asyncio.get_running_loop()
        limit = loop.time() - self._idle_seconds
        due = [
            connection for idle in self._idle.values() for connection, since in idle.items() if since <= limit
        ]
        for connection in due:
            self.lost(connection)
        first = [since for idle in self._idle.values() for _, since in _first(idle)]
        self._timer = loop.call_at(min(first) + self._idle_seconds, self._expire) if first else None


def _first(idle: dict[Connection, float]) -> list[tuple[Connection, float]]:
    return [next(iter(idle.items()))]
