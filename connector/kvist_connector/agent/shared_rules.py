"""What is retired, in a shared store beside the chunks that it concerns.

An agent that has lost its files learns it from there before it uses the store. Objects never change, so
the rules of one model state are a few objects with places of their own, each the union of all that
its writer found and knew:

    collect what is there -> put the union at the next free place, if absent -> delete what was collected

Nothing is deleted before an object that covers it is there, so writers at the same time leave one
object each, and the next one makes one of them. Called by rule_keeper.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec
import xxhash

from kvist_connector.errors import StorageFull, TierError
from kvist_connector.keys import KEY_BYTES
from kvist_connector.protocol.retired import AHEAD, Retired
from kvist_connector.tiers.base import ChunkStore, Read
from kvist_connector.tiers.envelope import SCOPE_BYTES

PLACES: Final = 16
_TRIES: Final = 16
_MAGIC: Final = b"KVISTRET"
_SUM_BYTES: Final = 8
_MOST_BYTES: Final = 4 << 20


class Written(msgspec.Struct, frozen=True, array_like=True):
    """One object; `number` grows with every one, so that a place is not used again soon."""

    number: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    retired: Retired


class SharedRules:
    """Of one model state in one store. `now`: an epoch above all known ones, for objects that cannot be read.

    `damaged` after a look: some object cannot be read. It counts as if it retired all that was stored until
    it was first seen, and not once more at every look; `publish` replaces it.
    """

    def __init__(self, store: ChunkStore, fingerprint: bytes, now: Callable[[], int]) -> None:
        self._store = store
        scope = xxhash.xxh3_128_digest(b"retired" + fingerprint[:SCOPE_BYTES])
        self._names = [scope + place.to_bytes(KEY_BYTES, "big") for place in range(PLACES)]
        self._now = now
        self._unreadable: dict[bytes, tuple[bytes, int]] = {}  # by name: digest, and the epoch it counts as

    @property
    def damaged(self) -> bool:
        """See the class."""
        return bool(self._unreadable)

    async def read(self) -> Retired:
        """What all objects say together. Raises TierError."""
        return _union(await self._collect())

    async def publish(self, known: Retired) -> bool:
        """The store says at least this afterwards; true when this call wrote it. Raises TierError."""
        for _ in range(_TRIES):
            there = await self._collect()
            union = _union(there)
            if union.covers(known) and not self.damaged:
                return False
            number = max((found.number for found in there if found is not None), default=0) + 1
            place = _free_place(there, number)
            if there[place] is not None:
                # Every place is taken. What goes first is known to whoever calls us, on its disk too.
                if not known.covers(union):
                    raise TierError("more is retired there than was known just now")
                await self._store.delete(self._names[place])
            data = _pack(Written(number, union.merge(known)))
            if await self._put(self._names[place], data):
                for old, found in enumerate(there):
                    if found is not None and old != place:
                        await self._store.delete(self._names[old])
                return True
        raise TierError("others change what is retired there all the time")

    async def _put(self, name: bytes, data: bytes) -> bool:
        try:
            return await self._store.put_if_absent(name, [data])
        except StorageFull as error:
            raise TierError(f"there is no room for what is retired: {error}") from error

    async def _collect(self) -> list[Written | None]:
        """All objects, of one moment: two looks that see the same are one."""
        before = await self._sizes()
        for _ in range(_TRIES):
            found = [await self._read(name, size) for name, size in zip(self._names, before, strict=True)]
            after = await self._sizes()
            if after == before and [item is None for item in found] == [size is None for size in after]:
                return found
            before = after
        raise TierError("others change what is retired there all the time")

    async def _sizes(self) -> list[int | None]:
        sizes: list[int | None] = []
        for answer in await self._store.sizes(self._names):
            if isinstance(answer, Exception):
                raise answer
            sizes.append(answer)
        return sizes

    async def _read(self, name: bytes, size: int | None) -> Written | None:
        data = bytearray(min(size or 0, _MOST_BYTES))
        if size is None or await self._store.get(Read(name, [memoryview(data)])) is None:
            self._unreadable.pop(name, None)
            return None
        found = _unpack(bytes(data))
        if found is not None and is_plausible(found.retired, self._now()):
            self._unreadable.pop(name, None)
            return found
        # As with a file: what cannot be read may have retired anything.
        digest = xxhash.xxh3_128_digest(data)
        seen, epoch = self._unreadable.get(name, (b"", 0))
        if seen != digest:
            epoch = self._now()
            self._unreadable[name] = digest, epoch
        return Written(0, Retired(epoch=epoch, floor=epoch))


def is_plausible(found: Retired, now: int) -> bool:
    """Whether it can be what some agent knew: none of its epochs is after its latest, or far ahead."""
    latest = max(found.floor, *found.rules.values(), 0)
    return latest <= found.epoch <= now + AHEAD


def _union(found: Sequence[Written | None]) -> Retired:
    union = Retired()
    for each in found:
        union = union.merge(each.retired) if each is not None else union
    return union


def _free_place(there: Sequence[Written | None], number: int) -> int:
    order = [(number + step) % PLACES for step in range(PLACES)]
    return next((place for place in order if there[place] is None), order[0])


def _pack(written: Written) -> bytes:
    body = msgspec.json.encode(written)
    return _MAGIC + xxhash.xxh3_64_digest(body) + body


def _unpack(data: bytes) -> Written | None:
    start = len(_MAGIC) + _SUM_BYTES
    body = data[start:]
    if not data.startswith(_MAGIC) or data[len(_MAGIC) : start] != xxhash.xxh3_64_digest(body):
        return None
    try:
        return msgspec.json.decode(body, type=Written)
    except msgspec.DecodeError:
        return None
