"""What other agents may read of this one: the chunks in its arena, as a shared tier would hold them.

Called by peer_api.py, on the agent's loop. A chunk that is being read is leased, so that neither
eviction nor a control gives its slot away; formatting the arena waits for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO, Final, Protocol

from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Chunk
from kvist_connector.agent.core import Core
from kvist_connector.protocol.engine import SlotRef
from kvist_connector.protocol.tiers import Tier
from kvist_connector.tiers.envelope import SCOPE_BYTES
from kvist_connector.tiers.header import HEADER_BYTES, Header, checksum, pack_header

_KEY_BYTES: Final = 16
_MOST_DIGESTS: Final = 16_384  # 3 MiB


@dataclass(frozen=True)
class Opened:
    """One object: `head`, then the spans (offset, length) of the file. `close` it once, exactly."""

    head: bytes
    file: BinaryIO
    spans: Sequence[tuple[int, int]]
    close: Callable[[], None]

    @property
    def size(self) -> int:
        """Bytes of the whole object."""
        return len(self.head) + sum(length for _, length in self.spans)


class Shelf(Protocol):
    """What peer_api.py serves."""

    def sizes(self, names: Sequence[bytes]) -> list[int | None]:
        """Bytes of each object, None for what is not there."""

    async def open(self, name: bytes) -> Opened | None:
        """The object, kept as it is until it is closed; None when it is not there."""


class ArenaShelf:
    """`file` is the arena's. Chunks on this agent's own disk are brought in when they are opened."""

    def __init__(self, core: Core, busy: Busy, threads: Executor, file: BinaryIO) -> None:
        self._core = core
        self._busy = busy
        self._threads = threads
        self._file = file
        # A slot keeps its bytes for as long as it has its generation.
        self._digests: OrderedDict[SlotRef, bytes] = OrderedDict()

    def sizes(self, names: Sequence[bytes]) -> list[int | None]:
        """See Shelf. Only what is in the arena: a lookup has no time for a disk."""
        size = HEADER_BYTES + self._core.memory.chunk_bytes
        return [size if self._chunk(name) is not None else None for name in names]

    async def open(self, name: bytes) -> Opened | None:
        """See Shelf."""
        chunk = self._chunk(name) or await self._brought(name)
        layout = self._core.memory.layout
        if chunk is None or chunk.ref is None or layout is None:
            return None
        with ExitStack() as stack:
            # A read is no hit: whoever reads has the chunk then, and answers for it.
            self._core.memory.lease(chunk)
            stack.callback(self._give_back, chunk)
            stack.enter_context(self._busy.hold())
            head = await self._head(chunk, chunk.ref, layout.fingerprint)
            spans = self._core.memory.spans(chunk.ref)
            return Opened(head, self._file, spans, stack.pop_all().close)
        return None

    def _chunk(self, name: bytes) -> Chunk | None:
        return self._core.catalog.resident(name[SCOPE_BYTES:]) if self._ours(name) else None

    def _ours(self, name: bytes) -> bool:
        layout = self._core.memory.layout
        whole = len(name) == SCOPE_BYTES + _KEY_BYTES
        return layout is not None and whole and name.startswith(layout.fingerprint[:SCOPE_BYTES])

    async def _brought(self, name: bytes) -> Chunk | None:
        key = name[SCOPE_BYTES:]
        if not self._ours(name) or Tier.DISK not in self._core.catalog.tiers_of(key):
            return None
        await self._core.loader.bring([key], copy=True)
        return self._chunk(name)

    async def _head(self, chunk: Chunk, ref: SlotRef, fingerprint: bytes) -> bytes:
        views = self._core.memory.views(ref)
        size = self._core.memory.chunk_bytes
        digest = await self._digest(ref, views)
        return pack_header(
            Header(
                fingerprint=fingerprint,
                key=chunk.key,
                parent=chunk.parent,
                index=chunk.index,
                ranks=len(views),
                raw_bytes=size,
                stored_bytes=size,
                checksum=digest,
                tags=chunk.tags,
                retire_epoch=chunk.epoch or 0,
                lossy=Tier.MEMORY in chunk.lossy,
            )
        )

    async def _digest(self, ref: SlotRef, views: Sequence[memoryview]) -> bytes:
        found = self._digests.get(ref)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, checksum, views)
            self._digests[ref] = found
            if len(self._digests) > _MOST_DIGESTS:
                self._digests.popitem(last=False)
        return found

    def _give_back(self, chunk: Chunk) -> None:
        self._core.memory.unlease(chunk)
        self._core.room_changed()
