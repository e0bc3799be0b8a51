"""Which chunks to store and which stored ones count. Torch-free, no I/O.

Used by the scheduler half. Workers only fill slots; a slot is committed here, when every
rank has filled it, no load error touched the request in that step or since, and the
chunk's parent is known to the agent. One store per key is under way at a time.

A slot goes back to the agent only when no rank can still be writing into it: every rank
has answered for its ticket.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvist_connector.keys import split_keys
from kvist_connector.protocol.engine import Commit, SlotRef
from kvist_connector.transfer.plan import Piece

MIN_KNOWN = 65536


class KnownKeys:
    """Bounded set of keys the agent has, least recently used first out."""

    def __init__(self, limit: int = MIN_KNOWN) -> None:
        self._limit = limit
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        if key not in self._keys:
            return False
        self._keys.move_to_end(key)
        return True

    def __len__(self) -> int:
        return len(self._keys)

    def grow(self, limit: int) -> None:
        """Room for at least `limit` keys."""
        self._limit = max(self._limit, limit)

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()


@dataclass
class Pending:
    """A store under way."""

    ticket: int
    key: bytes
    parent: bytes
    index: int
    ref: SlotRef
    request: str
    tags: tuple[str, ...]
    epoch: int
    filled: int = 0
    answers: int = 0
    spoiled: bool = False


@dataclass
class Wanted:
    """Chunks of a request that are computed when this step ends: what `StoreLedger.plan` decides on."""

    request: str
    root: bytes
    keys: Sequence[bytes]  # of the leading chunks that count
    start: int  # chunks known to be stored
    pages: Sequence[int]  # the engine's pages from the first token on
    blocks_per_chunk: int
    tags: tuple[str, ...] = ()
    epoch: int = 0


@dataclass
class Planned:
    """What to store now; `start` moves past chunks the agent has; `closed` ends storing for the request."""

    pieces: list[Piece] = field(default_factory=list)
    start: int = 0
    closed: bool = False


class StoreLedger:
    """Grants, stores under way, known keys: all that belongs to one agent connection."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._grants: deque[SlotRef] = deque()
        self._by_key: dict[bytes, Pending] = {}  # in the order of planning
        self._by_ticket: dict[int, Pending] = {}
        self._next_ticket = 0
        self.known = KnownKeys()

    def reset(self) -> None:
        """The connection is gone: its grants are void, what was known may have been evicted."""
        self._grants.clear()
        self._by_key.clear()
        self._by_ticket.clear()
        self.known.clear()

    def grant(self, refs: Iterable[SlotRef]) -> None:
        self._grants.extend(refs)

    def evicted(self, joined: bytes) -> None:
        self.known.discard(split_keys(joined))

    @property
    def granted(self) -> int:
        """Slots left to fill."""
        return len(self._grants)

    @property
    def under_way(self) -> int:
        """Stores not yet committed or discarded."""
        return len(self._by_key)

    def plan(self, wanted: Wanted) -> Planned:
        """Stores for the chunks nobody has, in chain order, until slots run out."""
        planned = Planned(start=wanted.start)
        for index in range(wanted.start, len(wanted.keys)):
            key = wanted.keys[index]
            if key in self.known:
                if planned.start == index:
                    planned.start = index + 1
                continue
            if key in self._by_key:
                continue
            parent = wanted.keys[index - 1] if index else wanted.root
            if index and parent not in self.known and parent not in self._by_key:
                planned.closed = True  # its parent was evicted: an orphan would never be found
                break
            if not self._grants:
                break
            planned.pieces.append(self._take_slot(wanted, index, key, parent))
        return planned

    def answer(self, filled: Counter[int], unfilled: Counter[int]) -> None:
        """Ranks have ended their part of stores."""
        for ticket, ranks in filled.items():
            if (pending := self._by_ticket.get(ticket)) is not None:
                pending.filled += ranks
                pending.answers += ranks
        for ticket, ranks in unfilled.items():
            if (pending := self._by_ticket.get(ticket)) is not None:
                pending.answers += ranks

    def spoil(self, requests: set[str]) -> None:
        """A load error touched these requests: nothing filled for them counts."""
        for pending in self._by_key.values():
            if pending.request in requests:
                pending.spoiled = True

    def settle(self) -> tuple[list[Commit], list[SlotRef]]:
        """Stores that every rank has answered: commits in chain order, and slots to hand back."""
        commits: list[Commit] = []
        discards: list[SlotRef] = []
        for pending in list(self._by_key.values()):
            if pending.answers < self._ranks or pending.parent in self._by_key:
                continue
            del self._by_key[pending.key]
            del self._by_ticket[pending.ticket]
            good = pending.filled == self._ranks and not pending.spoiled
            if good and (pending.index == 0 or pending.parent in self.known):
                self.known.add((pending.key,))
                commits.append(_commit(pending))
            else:
                discards.append(pending.ref)
        return commits, discards

    def _take_slot(self, wanted: Wanted, index: int, key: bytes, parent: bytes) -> Piece:
        ref = self._grants.popleft()
        self._next_ticket += 1
        pending = Pending(
            self._next_ticket, key, parent, index, ref, wanted.request, wanted.tags, wanted.epoch
        )
        self._by_key[key] = self._by_ticket[pending.ticket] = pending
        first = index * wanted.blocks_per_chunk
        pages = tuple(wanted.pages[first : first + wanted.blocks_per_chunk])
        return Piece(ref.slot, ref.generation, 0, pages, ticket=pending.ticket)


def _commit(pending: Pending) -> Commit:
    return Commit(
        ref=pending.ref,
        key=pending.key,
        parent=pending.parent,
        index=pending.index,
        tags=pending.tags,
        epoch=pending.epoch,
    )
