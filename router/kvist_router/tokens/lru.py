"""A map bounded by the size of what is in it; the least recently used entry goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SizedLRU(Generic[K, V]):
    """`capacity` and sizes are in one unit of the caller's choice. Not thread-safe: one loop owns it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value, now most recently used; None on a miss."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def get_all(self, keys: Sequence[K]) -> list[V | None]:
        """The same for many."""
        entries = self._entries
        found: list[V | None] = []
        for key in keys:
            entry = entries.get(key)
            if entry is None:
                found.append(None)
            else:
                entries.move_to_end(key)
                found.append(entry[0])
        return found

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value; one that is larger than the whole capacity is not kept."""
        old = self._entries.pop(key, None)
        if old is not None:
            self.size -= old[1]
        if size > self._capacity:
            return
        self._entries[key] = (value, size)
        self.size += size
        while self.size > self._capacity:
            _, (_, gone) = self._entries.popitem(last=False)
            self.size -= gone
