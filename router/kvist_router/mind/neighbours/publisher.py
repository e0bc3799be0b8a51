"""Says to other routers what this one sends. Called by mind/inflight.py and server.py.

Frames are encoded once for all listeners, and not at all while there is none. Each listener has a buffer of
bounded size; one that is too slow to empty it is cut off, never waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from kvist_connector.protocol.framing import encode
from kvist_router.mind.inflight import InFlight
from kvist_router.mind.neighbours.messages import (
    MAX_KEYS,
    MAX_SECONDS,
    VERSION,
    Beat,
    Dispatched,
    Ended,
    Opening,
    Prefilled,
    Said,
)

BUFFER_BYTES: Final = 4 * 2**20
BEAT: Final = encode(Beat())


class Listener:
    """What one reader has not got yet."""

    def __init__(self, frames: bytes) -> None:
        self.frames = bytearray(frames)
        self._news = asyncio.Event()
        self._news.set()
        self.cut_off = False

    def put(self, frame: bytes) -> None:
        """Add a frame, or cut off who is too slow."""
        if len(self.frames) + len(frame) > BUFFER_BYTES:
            self.frames.clear()
            self.cut_off = True
        if not self.cut_off:
            self.frames += frame
        self._news.set()

    async def take(self, seconds: float) -> bytes:
        """All that is there, a beat when nothing came for `seconds`; b"" once it is cut off."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return BEAT
        self._news.clear()
        frames = bytes(self.frames)
        self.frames.clear()
        return frames


class Publisher:
    """`router` is this one's name, `instance` what it knows itself by."""

    def __init__(self, router: str, instance: bytes, running: Iterable[InFlight]) -> None:
        self.router, self.instance = router, instance
        self._running = running
        self._listeners: set[Listener] = set()

    def listen(self, now: float) -> Listener:
        """One more reader, which first hears of all that runs."""
        frames = [encode(Opening(version=VERSION, router=self.router, instance=self.instance))]
        for entry in self._running:
            frames.append(encode(dispatched(entry, now)))
            if entry.prefilled:
                frames.append(encode(Prefilled(request=entry.id)))
        listener = Listener(b"".join(frames))
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """A reader has gone."""
        self._listeners.discard(listener)

    def began(self, entry: InFlight) -> None:
        """See inflight.Watcher."""
        if self._listeners:
            self._say(dispatched(entry, entry.decided))

    def prefilled(self, entry: InFlight) -> None:
        """See inflight.Watcher."""
        if self._listeners:
            self._say(Prefilled(request=entry.id))

    def ended(self, entry: InFlight) -> None:
        """See inflight.Watcher."""
        if self._listeners:
            self._say(Ended(request=entry.id))

    def _say(self, message: Said) -> None:
        frame = encode(message)
        for listener in self._listeners:
            listener.put(frame)


def dispatched(entry: InFlight, now: float) -> Dispatched:
    """What is told of a request that runs."""
    keys, computes = entry.keys[:MAX_KEYS], entry.computes
    held = keys.index(computes[0]) if computes and computes[0] in keys else len(keys)
    ready = entry.decided + entry.predicted_ttft - now
    return Dispatched(
        request=entry.id,
        replica=entry.replica.name,
        tokens=entry.uncached_tokens,
        ready=min(MAX_SECONDS, max(0.0, ready)),
        keys=b"".join(keys),
        held=held,
    )
