"""Several peers as one store: all are asked what they have, one that has it is read.

A peer that fails is left out and said to `on_failure`; the others answer for themselves. What a peer
said it has is remembered for a while, so that a read goes there. One whose bytes turned out to be
wrong is not asked for `pause` seconds. Guests are peers that somebody named for one errand.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from kvist_connector.errors import TierError
from kvist_connector.tiers.base import ChunkStore, Read
from kvist_connector.tiers.peer import ReadOnlyStore

V = TypeVar("V")
_MOST_REMEMBERED: Final = 65_536
_MOST_GUESTS: Final = 8


class AnyoneStore(ReadOnlyStore):
    """`connect` opens the store of an address. Seconds throughout."""

    def __init__(
        self,
        connect: Callable[[str], ChunkStore],
        pause: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers: dict[str, ChunkStore] = {}
        self._connect = connect
        self._pause = pause
        self._clock = clock
        self._guests: OrderedDict[str, ChunkStore] = OrderedDict()
        self._where: OrderedDict[bytes, list[str]] = OrderedDict()
        self._served: OrderedDict[bytes, str] = OrderedDict()  # who gave an object that was read last
        self._shunned: dict[str, float] = {}  # until when
        self._reading: Counter[str] = Counter()
        self.on_failure: Callable[[str, Exception], None] = lambda peer, error: None

    @property
    def problem(self) -> str:
        """Of the first one, when none can be asked."""
        found = [store.problem for store in self._peers.values()]
        return found[0] if found and all(found) else ""

    async def probe(self) -> None:
        """See ChunkStore; one peer that answers is enough."""
        found = await asyncio.gather(
            *(store.probe() for store in self._peers.values()), return_exceptions=True
        )
        for error in found:
            if error is None:
                return
            if not isinstance(error, TierError):
                raise error
        if found and found[0] is not None:
            raise found[0]

    async def get(self, read: Read) -> int | None:
        """See ChunkStore; the next peer is tried when one has it no more or fails."""
        for peer in self._having(read.key):
            self._reading[peer] += 1
            try:
                length = await self._store(peer).get(read)
            except TierError as error:
                self.on_failure(peer, error)
                continue
            finally:
                self._reading[peer] -= 1
                self._reading += Counter()  # keeps what is positive
            if length is not None:
                _remember(self._served, read.key, peer)
                return length
        return None

    async def sizes(self, keys: Sequence[bytes]) -> list[int | Exception | None]:
        """See ChunkStore; an exception only when no peer could be asked."""
        asked = [peer for peer in self._peers if not self._is_shunned(peer)]
        answers = await asyncio.gather(*(self._peers[peer].sizes(keys) for peer in asked))
        found: list[int | Exception | None] = [None] * len(keys)
        failures: list[Exception] = []
        for peer, answer in zip(asked, answers, strict=True):
            failure = next((size for size in answer if isinstance(size, Exception)), None)
            if failure is not None:
                failures.append(failure)
                self.on_failure(peer, failure)
        for position, key in enumerate(keys):
            having = [
                (peer, answer[position])
                for peer, answer in zip(asked, answers, strict=True)
                if isinstance(answer[position], int)
            ]
            if having:
                found[position] = having[0][1]
                _remember(self._where, key, [peer for peer, size in having if size == having[0][1]])
        if failures and len(failures) == len(self._peers):
            return [failures[0]] * len(keys)
        return found

    def become(self, peers: Iterable[str]) -> list[ChunkStore]:
        """These are the peers from now on; the stores of those that are none any more, to be closed."""
        wanted = list(peers)
        gone = [self._peers.pop(peer) for peer in list(self._peers) if peer not in wanted]
        for peer in wanted:
            if peer not in self._peers:
                known = peer in self._guests
                self._peers[peer] = self._guests.pop(peer) if known else self._connect(peer)
        return gone

    async def change(self, peers: Iterable[str]) -> None:
        """`become`, and close what is not needed any more."""
        for store in self.become(peers):
            await store.close()

    async def visit(self, peer: str, keys: Sequence[bytes]) -> None:
        """These are to be read from this peer, whether it is one of ours or not."""
        if peer not in self._peers and peer not in self._guests:
            self._guests[peer] = self._connect(peer)
        if peer in self._guests:
            self._guests.move_to_end(peer)
        while len(self._guests) > _MOST_GUESTS:
            _, oldest = self._guests.popitem(last=False)
            await oldest.close()
        for key in keys:
            _remember(self._where, key, [peer])

    def distrust(self, key: bytes) -> str:
        """What was read of it last was not the object: its peer is left alone for a while; who that is."""
        peer = self._served.pop(key, None) or next(iter(self._where.get(key, ())), "")
        self._where.pop(key, None)
        if peer:
            self._shunned = {
                other: until for other, until in self._shunned.items() if self._is_shunned(other)
            }
            self._shunned[peer] = self._clock() + self._pause
        return peer

    async def close(self) -> None:
        """See ChunkStore."""
        for store in (*self._peers.values(), *self._guests.values()):
            await store.close()

    def _having(self, key: bytes) -> list[str]:
        """Whom to read it from: least busy first; all of them when nobody was asked."""
        known = self._where.get(key) or list(self._peers)
        reachable = [peer for peer in known if peer in self._peers or peer in self._guests]
        trusted = [peer for peer in reachable if not self._is_shunned(peer)]
        return sorted(trusted, key=lambda peer: self._reading[peer])

    def _store(self, peer: str) -> ChunkStore:
        return self._peers[peer] if peer in self._peers else self._guests[peer]

    def _is_shunned(self, peer: str) -> bool:
        return self._clock() < self._shunned.get(peer, 0.0)


def _remember(book: OrderedDict[bytes, V], key: bytes, value: V) -> None:
    book[key] = value
    book.move_to_end(key)
    while len(book) > _MOST_REMEMBERED:
        book.popitem(last=False)
