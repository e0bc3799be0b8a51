"""Draining: this replica is about to go, and nothing should be lost by it.

    drain ->  feed: State(draining)  -> routers send new requests elsewhere, and acknowledge
              routers acknowledged, their requests and the engine's have ended
              all that lower tiers lack is written, the most valuable first; or peers take it (parting.py)
    answer <- done, or at the deadline what was left

A drain changes nothing in the engine: it goes on serving, and `undo` takes the drain back. Routers are
the feed's readers that said they acknowledge; one that leaves is not waited for. Called by http.py; all
on the agent's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvist_connector.agent.core import Core
from kvist_connector.agent.feed import Feed
from kvist_connector.agent.parting import Parting
from kvist_connector.agent.writebehind import WriteBehind

MAX_DEADLINE = 24 * 3600.0


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of drain; deadline in seconds."""

    deadline: float = 0.0
    undo: bool = False


class AcknowledgeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of acknowledge: a router sends no new requests here, and `in_flight` of its own still run."""

    reader: str
    in_flight: int


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What a drain waits for, or what was left at its deadline."""

    draining: bool
    routers: list[str]  # that have not acknowledged
    requests: int
    chunks: int  # not written to the lower tiers, or taken by peers
    bytes: int


@dataclass
class Drain:
    """Drain of one agent. `gpu_known` goes into the feed's flag message."""

    core: Core
    feed: Feed
    writebehind: WriteBehind
    parting: Parting
    gpu_known: Callable[[], bool]
    _in_flight: dict[str, int] = field(default_factory=dict)  # by reader that has acknowledged

    def __post_init__(self) -> None:
        self._news = asyncio.Event()

    async def drain(self, deadline: float) -> Left:
        """Begin, and wait for the end or the deadline."""
        self._set(True)
        with contextlib.suppress(TimeoutError):  # what is left is the answer
            async with asyncio.timeout(deadline):
                # Written while streams still run, and again what those have added.
                self.writebehind.hurry()
                await asyncio.gather(self._quiet(), self.parting.run())
                if self.core.draining:
                    self.writebehind.hurry()
                    await asyncio.gather(self.writebehind.flush(deadline), self.parting.run())
        return self.left()

    async def _quiet(self) -> None:
        """No router sends any more and no request runs, or the drain was taken back."""
        while self.core.draining and (self._missing() or self._requests()):
            await self._news.wait()

    def undo(self) -> Left:
        """Requests are welcome again; whoever waits is answered."""
        self._set(False)
        return self.left()

    def left(self) -> Left:
        """What there is to wait for now."""
        return Left(
            draining=self.core.draining,
            routers=self._missing() if self.core.draining else [],
            requests=self._requests(),
            chunks=self.writebehind.pending_chunks + self.parting.pending,
            bytes=self.writebehind.pending_bytes + self.parting.pending * self.core.memory.chunk_bytes,
        )

    def acknowledge(self, reader: str, in_flight: int) -> bool:
        """A router knows; false when it is no reader here or there is no drain."""
        if not self.core.draining or reader not in self.feed.acknowledging:
            return False
        self._in_flight[reader] = in_flight
        self.notice()
        return True

    def reader_changed(self, name: str) -> None:
        """A feed reader came or went: its next connection acknowledges anew."""
        self._in_flight.pop(name, None)
        self.notice()

    def notice(self) -> None:
        """Something that is waited for may have happened."""
        self._news.set()
        self._news = asyncio.Event()

    def _set(self, draining: bool) -> None:
        if self.core.draining != draining:
            self.core.draining = draining
            self._in_flight.clear()
            self.feed.state(self.gpu_known(), draining)
        self.notice()

    def _missing(self) -> list[str]:
        return sorted(set(self.feed.acknowledging) - self._in_flight.keys())

    def _requests(self) -> int:
        """Of routers and engine the larger figure: each knows of some before the other does."""
        load = self.core.engine_load
        engine = load.waiting_requests + load.running_requests if self.core.schedulers else 0
        return max(engine, sum(self._in_flight.values()))
