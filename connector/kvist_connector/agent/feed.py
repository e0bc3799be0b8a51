"""The feed's publisher: a snapshot, then everything that changes, to each reader at its own pace.

Frames wait in a bounded buffer a reader; a reader that lets it fill is disconnected and takes a
new snapshot when it comes back. Deltas of one loop turn travel together. Nothing is encoded
while nobody reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvist_connector.protocol.engine import EngineLoad, Message, RequestRecord
from kvist_connector.protocol.feed import Delta, Load, Opening, Record, Snapshot, State, TierSpeed
from kvist_connector.protocol.framing import encode
from kvist_connector.protocol.tiers import Tier

MAX_READERS = 64
BUFFER_BYTES = 32 * 1024 * 1024
SNAPSHOT_KEYS = 4096  # of a part: a router does something else between two
LOAD_SECONDS = 0.05
HEARTBEAT_SECONDS = 1.0


class Reader:
    """One stream. Frames are numbered here, so every reader sees a sequence of its own."""

    def __init__(self, opening: Opening, limit: int, acknowledges: bool = False) -> None:
        self._frames: deque[bytes] = deque([encode(opening)])
        self._bytes = len(self._frames[0])
        self._limit = limit
        self._sequence = 0
        self._more = asyncio.Event()
        self._more.set()
        self.acknowledges = acknowledges  # a router, which a drain waits for
        self.closed = False

    def push(self, make: Callable[[int], Message]) -> None:
        """Queue a frame; a full buffer ends the stream."""
        if self.closed:
            return
        self._sequence += 1
        frame = encode(make(self._sequence))
        if self._bytes + len(frame) > self._limit:
            self.close()
            self._frames.clear()
            return
        self._frames.append(frame)
        self._bytes += len(frame)
        self._more.set()

    def close(self) -> None:
        """End the stream after what is queued."""
        self.closed = True
        self._more.set()

    async def take(self) -> bytes:
        """The frames queued by now, at least one; b"" when the stream has ended."""
        while not self._frames and not self.closed:
            self._more.clear()
            await self._more.wait()
        taken = b"".join(self._frames)
        self._frames.clear()
        self._bytes = 0
        return taken


@dataclass(frozen=True)
class View:
    """What the publisher reads of the agent, as functions: it keeps no copy."""

    opening: Callable[[], Opening]
    tiers: Callable[[], Sequence[Tier]]
    keys: Callable[[Tier], Sequence[bytes]]
    speeds: Callable[[], tuple[TierSpeed, ...]]
    chunk_bytes: Callable[[], int]
    connected: Callable[[], bool]


class Feed:
    """Publisher of one agent; all calls on its loop."""

    def __init__(self, view: View, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._view = view
        self._buffer_bytes = buffer_bytes
        self._readers: dict[str, Reader] = {}
        self._changes: dict[Tier, dict[bytes, bool]] = {}
        self._load = EngineLoad()
        self._sent: tuple[object, ...] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self.overruns = 0
        self.on_reader: Callable[[str], None] = lambda name: None  # one came or went

    @property
    def readers(self) -> int:
        """Open streams."""
        return len(self._readers)

    @property
    def acknowledging(self) -> list[str]:
        """Names of open streams whose readers acknowledge a drain."""
        return [name for name, reader in self._readers.items() if reader.acknowledges]

    def open(self, name: str, acknowledges: bool = False) -> Reader | None:
        """A new stream, snapshot queued; it replaces one of the same name. None: too many readers."""
        old = self._readers.pop(name, None)
        if old is not None:
            old.close()
        if len(self._readers) >= MAX_READERS:
            return None
        self._flush()
        # The snapshot itself may be larger than the buffer of a reader that has caught up.
        parts = list(self._snapshot())
        room = self._buffer_bytes + sum(len(keys) + 64 for _, keys, _ in parts)
        reader = Reader(self._view.opening(), room, acknowledges)
        for part in parts:
            tier, keys, last = part
            reader.push(lambda n, t=tier, k=keys, e=last: Snapshot(sequence=n, tier=t, keys=k, last=e))  # type: ignore[misc]
        self._readers[name] = reader
        self.on_reader(name)
        self._push_load()
        return reader

    def leave(self, name: str, reader: Reader) -> None:
        """The stream's connection ended."""
        reader.close()
        if self._readers.get(name) is reader:
            del self._readers[name]
            self.on_reader(name)

    def renew(self) -> None:
        """A new epoch: every reader has to start over."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._changes.clear()

    def change(self, tier: Tier, key: bytes, added: bool) -> None:
        """A key entered or left a tier."""
        if not self._readers:
            return
        if not self._changes:
            asyncio.get_running_loop().call_soon(self._flush)
        # Only the last change of a turn counts; the reader's view is a set.
        self._changes.setdefault(tier, {})[key] = added

    def record(self, record: RequestRecord) -> None:
        """A request's prefill ended."""
        self._push(lambda n: Record(sequence=n, record=record))

    def state(self, gpu_known: bool, draining: bool) -> None:
        """Residency on the GPU became known or unknown, or draining began."""
        if not gpu_known:
            self._changes.pop(Tier.GPU, None)
        self._flush()
        self._push(lambda n: State(sequence=n, gpu_known=gpu_known, draining=draining))

    def load(self, load: EngineLoad) -> None:
        """The engine's load changed: sent within LOAD_SECONDS."""
        self._load = load
        self._arm(LOAD_SECONDS)

    def connection_changed(self) -> None:
        """The engine connected or left."""
        self._arm(0.0)

    def close(self) -> None:
        """End all streams and timers."""
        self.renew()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _snapshot(self) -> Iterator[tuple[Tier, bytes, bool]]:
        parts: list[tuple[Tier, bytes]] = []
        for tier in self._view.tiers():
            keys = self._view.keys(tier)
            for start in range(0, len(keys), SNAPSHOT_KEYS):
                parts.append((tier, b"".join(keys[start : start + SNAPSHOT_KEYS])))
        if not parts:
            parts.append((Tier.MEMORY, b""))
        for number, (tier, joined) in enumerate(parts, start=1):
            yield tier, joined, number == len(parts)

    def _push(self, make: Callable[[int], Message]) -> None:
        for name, reader in list(self._readers.items()):
            reader.push(make)
            if reader.closed:
                self.overruns += 1
                del self._readers[name]
                self.on_reader(name)

    def _flush(self) -> None:
        changes, self._changes = self._changes, {}
        for tier, keys in changes.items():
            added = b"".join(key for key, here in keys.items() if here)
            removed = b"".join(key for key, here in keys.items() if not here)
            self._push(lambda n, t=tier, a=added, r=removed: Delta(sequence=n, tier=t, added=a, removed=r))  # type: ignore[misc]

    def _arm(self, delay: float) -> None:
        """Send the load after `delay`, or earlier when that was promised already."""
        if not self._readers:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + delay
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        self._timer = loop.call_at(due, self._push_load)

    def _push_load(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        load, speeds = self._load, self._view.speeds()
        size, connected = self._view.chunk_bytes(), self._view.connected()
        self._push(
            lambda n: Load(sequence=n, load=load, speeds=speeds, chunk_bytes=size, engine_connected=connected)
        )
        self._arm(HEARTBEAT_SECONDS)
