"""What eviction has learned, beside the arena file: `<arena>.eviction`. It outlives the agent.

    magic, format, checksum of the rest (8 bytes), msgpack of {tier: Learned}

A file that is torn, of another format or not to be read is none: eviction learns anew. Nothing but
the order of eviction depends on it, so it is written now and then and at the end, not at every change; and
not at all when nothing was learned since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from kvist_connector.eviction import Learned
from kvist_connector.protocol.tiers import Tier

log = logging.getLogger(__name__)

_HEAD: Final = b"kvist eviction \x01"  # the last byte is the format: another one with other traits or ages
_START: Final = len(_HEAD) + 8  # of the rest
_MOST_BYTES: Final = 8 << 20  # five tiers with every trait there is need less
_EVERY: Final = 60.0  # seconds


class LearnedFile:
    """Nothing is opened before the first call."""

    def __init__(self, arena: Path) -> None:
        self.path = arena.with_name(f"{arena.name}.eviction")
        self._failed = False
        self._there: bytes | None = None  # head of what is in the file; it has the checksum

    def read(self) -> dict[Tier, Learned]:
        """What an earlier agent learned; empty when there is nothing that can be read."""
        try:
            with self.path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("%s cannot be read (%s): eviction learns anew", self.path, error.strerror)
            return {}
        found = _unpack(data)
        if found is None:
            log.warning("%s is damaged or of another format: eviction learns anew", self.path)
            return {}
        self._there = data[:_START]
        return found

    def write(self, learned: Mapping[Tier, Learned]) -> None:
        """Replace the file; a crash leaves the old or the new one. A failure is said once."""
        data = _pack(learned)
        if data[:_START] == self._there:
            return
        temporary = self.path.with_name(self.path.name + ".partial")
        try:
            temporary.write_bytes(data)
            temporary.replace(self.path)
        except OSError as error:
            if not self._failed:
                log.warning(
                    "%s cannot be written (%s): a restart learns anew what to evict",
                    self.path,
                    error.strerror,
                )
            self._failed = True
        else:
            self._failed = False
            self._there = data[:_START]

    async def keep(self, learned: Callable[[], Mapping[Tier, Learned]], threads: Executor) -> None:
        """Write it now and then, for ever."""
        while True:
            await asyncio.sleep(_EVERY)
            await asyncio.get_running_loop().run_in_executor(threads, self.write, learned())


def _pack(learned: Mapping[Tier, Learned]) -> bytes:
    body = msgspec.msgpack.encode({int(tier): found for tier, found in learned.items()})
    return _HEAD + xxhash.xxh3_64_digest(body) + body


def _unpack(data: bytes) -> dict[Tier, Learned] | None:
    body = data[_START:]
    if data[:_START] != _HEAD + xxhash.xxh3_64_digest(body) or len(data) > _MOST_BYTES:
        return None
    try:
        found = msgspec.msgpack.decode(body, type=dict[int, Learned])
        return {Tier(tier): learned for tier, learned in found.items() if learned.sound}
    except (msgspec.MsgspecError, ValueError):
        return None
