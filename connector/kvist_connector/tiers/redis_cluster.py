"""A Redis Cluster as one store: each key is asked of the member that has its slot now.

Called by `agent.stores`, which says how a member's store is opened and guarded: every member has
connections and a breaker of its own, so one that is lost takes its own keys with it and no others.
(The client library's cluster client fails a whole batch with one member, closes connections
that others are using, and does not wait for a free one.)

The map of slots comes from any member that answers: of those that were given, and of those
that were named the last time. It is read again when a member says that a key is elsewhere, when one fails,
and at every probe: after a failover or a move of slots the store goes on by itself. While a slot is
being moved its keys lie at two members: the old one answers for those that it still has, and names
the new one for all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from redis.crc import key_slot

from kvist_connector.errors import TierError
from kvist_connector.tiers.base import Buffer, Capabilities, Capacity, ChunkStore, ElsewhereError, Item, Read
from kvist_connector.tiers.redis import LARGEST_VALUE, ComingError, name_of
from kvist_connector.tiers.redis_server import RedisServer
from kvist_connector.tiers.redis_slots import Slots, ask_slots, url_of

R = TypeVar("R")
# Connections that only read the map.
_CONNECTIONS: Final = 1
# A key that moves from member to member faster than it is followed is a miss.
_FOLLOWED: Final = 3
# Members that are being given slots, at the same time.
_MOST_RECEIVING: Final = 16


class ClusterStore(ChunkStore):
    """See module. `servers`: some members, at least one; they differ in their hosts only.

    `ask`: seconds that a question waits for the map of slots; what moves bytes waits as long as
    for a connection.
    """

    def __init__(
        self,
        servers: Sequence[RedisServer],
        open_member: Callable[[RedisServer], ChunkStore],
        ask: float = 1.0,
    ) -> None:
        self._given = servers
        self._open = open_member
        self._ask = ask
        self._limit = servers[0].connect_timeout
        self._turn = 0  # which of the addresses is asked first for the map
        self._slots = Slots()
        self._members: dict[str, ChunkStore] = {}
        # Asked for slots that they are being given; the one asked last is the last.
        self._receiving: dict[str, ChunkStore] = {}
        self._reading: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def capabilities(self) -> Capabilities:
        """As a single Redis."""
        return Capabilities(persistent=True, shared=True, listable=True, largest=LARGEST_VALUE)

    @property
    def problem(self) -> str:
        """Of the first member that has any."""
        return next((member.problem for member in self._members.values() if member.problem), "")

    async def probe(self) -> None:
        """See ChunkStore; of the map, and of all members whatever one of them says."""
        await self._whole_map()
        found = await asyncio.gather(
            *(member.probe() for member in self._members.values()), return_exceptions=True
        )
        for error in found:
            if error is not None:
                raise error

    async def get(self, read: Read) -> int | None:
        """See ChunkStore."""
        return await self._at(read.key, lambda member: member.get(read))

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """See ChunkStore; one question for each member, all at the same time."""
        found: list[int | Exception | None] = [None] * len(keys)
        places: dict[ChunkStore, list[int]] = {}
        try:
            await self._known(self._ask)
        except TierError as error:
            return [error] * len(keys)
        for position, key in enumerate(keys):
            try:
                places.setdefault(self._member(key), []).append(position)
            except TierError as error:
                found[position] = error
        await _ask_each(found, keys, places)
        coming: dict[ChunkStore, list[int]] = {}
        for position, size in enumerate(found):
            if isinstance(size, ComingError):
                coming.setdefault(self._receiver(size), []).append(position)
        await _ask_each(found, keys, coming)
        if any(isinstance(size, Exception) for size in found):
            self._begin_reading()
        return found

    async def put_if_absent(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore."""
        return await self._at(key, lambda member: member.put_if_absent(key, parts))

    async def replace(self, key: bytes, seen: bytes, parts: Sequence[Buffer]) -> bool:
        """See ChunkStore."""
        return await self._at(key, lambda member: member.replace(key, seen, parts))

    async def delete(self, key: bytes) -> bool:
        """See ChunkStore."""
        return await self._at(key, lambda member: member.delete(key))

    async def items(self, prefix: bytes = b"") -> AsyncIterator[Item]:
        """See ChunkStore; TierError when some slots have no server, since the list would lack their keys."""
        await self._whole_map()
        # One that has no slot yet may have keys of the first that it is being given.
        for member in (self._receiving | self._members).values():
            async for item in member.items(prefix):
                yield item

    async def capacity(self) -> Capacity:
        """The sum over the primaries; no limit when one of them has none."""
        await self._known(self._limit)
        found = await asyncio.gather(*(member.capacity() for member in self._members.values()))
        limits = [each.limit for each in found if each.limit is not None]
        whole = sum(limits) if len(limits) == len(found) else None
        return Capacity(sum(each.used for each in found), whole)

    async def close(self) -> None:
        """See ChunkStore."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await asyncio.gather(*self._closing)
        for member in (*self._members.values(), *self._receiving.values()):
            await member.close()

    @property
    def _label(self) -> str:
        return self._given[0].label

    async def _at(self, key: bytes, work: Callable[[ChunkStore], Awaitable[R]]) -> R:
        """By the member that has the key; by another one when it says so."""
        await self._known(self._limit)
        try:
            member = self._member(key)
            for _ in range(_FOLLOWED):
                try:
                    return await work(member)
                except ComingError as error:
                    member = self._receiver(error)
                except ElsewhereError:
                    await self._read_map(self._limit)
                    member = self._member(key)
            return await work(member)
        except TierError:
            self._begin_reading()
            raise

    def _receiver(self, error: ComingError) -> ChunkStore:
        url = url_of(self._given[0].url, error.host, error.port)
        store = self._receiving.pop(url, None)
        if store is None:
            store = self._open(replace(self._given[0], url=url, asking=True))
        self._receiving[url] = store
        while len(self._receiving) > _MOST_RECEIVING:
            self._close_soon(self._receiving.pop(next(iter(self._receiving))))
        return store

    def _member(self, key: bytes) -> ChunkStore:
        url = self._slots.url(key_slot(name_of(key)))
        if url is None:
            self._begin_reading()
            raise TierError(f"{self._label}: no member of the cluster has this key's slot")
        return self._members[url]

    async def _known(self, limit: float) -> None:
        if not self._slots.urls:
            await self._read_map(limit)

    async def _whole_map(self) -> None:
        await self._read_map(self._limit)
        if not self._slots.whole:
            raise TierError(f"{self._label}: the cluster has slots without a server")

    async def _read_map(self, limit: float) -> None:
        """Joins a reading under way, which goes on when its callers have given up."""
        try:
            async with asyncio.timeout(limit):
                await asyncio.shield(self._begin_reading())
        except TimeoutError as error:
            raise TierError(f"{self._label}: who has which slots is not known after {limit:g} s") from error

    def _begin_reading(self) -> asyncio.Task[None]:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_heard)
        return self._reading

    async def _read(self) -> None:
        given = [server.url for server in self._given]
        urls = [*given, *(url for url in self._members if url not in given)]
        # One that is cut off from the others may believe in an old map: it is not the first for ever.
        self._turn += 1
        first = self._turn % len(urls)
        last: TierError | None = None
        partial: Slots | None = None
        for url in urls[first:] + urls[:first]:
            try:
                slots = await ask_slots(replace(self._given[0], url=url, connections=_CONNECTIONS))
            except TierError as error:
                last = error
                continue
            if slots.whole:
                self._use(slots)
                return
            partial = partial or slots
        if partial is None:
            raise last or TierError(f"{self._label}: no member answers")
        self._use(partial)

    def _use(self, slots: Slots) -> None:
        for url in set(self._members) - set(slots.urls):
            self._close_soon(self._members.pop(url))
        for url in slots.urls:
            if url not in self._members:
                self._members[url] = self._open(replace(self._given[0], url=url))
        self._slots = slots

    def _close_soon(self, store: ChunkStore) -> None:
        task = asyncio.create_task(store.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _ask_each(
    found: list[int | Exception | None], keys: Sequence[bytes], places: Mapping[ChunkStore, Sequence[int]]
) -> None:
    """Ask stores for the keys at these positions, all at the same time."""
    answers = await asyncio.gather(
        *(store.sizes([keys[position] for position in own]) for store, own in places.items())
    )
    for own, answer in zip(places.values(), answers, strict=True):
        for position, size in zip(own, answer, strict=True):
            found[position] = size


def _heard(task: asyncio.Task[None]) -> None:
    """An error that nobody waits for is no news."""
    if not task.cancelled():
        task.exception()
