"""Prefixes that were sent to a replica and are not in its feed yet.

Called by mind/replica.py. A follower of such a prefix is forwarded, never held: the engine
computes it once, so its cost there is the time until the leader is done. An entry ends when the
feed reports the key, when the leader fails, or by time. Bounded: the oldest entry goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Pending:
    """Keys of one replica with the time their computation is expected to end."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.entries: OrderedDict[bytes, tuple[float, float, str]] = OrderedDict()  # ready, expires, owner

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, keys: Sequence[bytes], ready: float, expires: float, owner: str) -> None:
        """The request `owner` computes `keys` until about `ready`; keys of an earlier owner stay theirs."""
        for key in keys:
            if key not in self.entries:
                self.entries[key] = (ready, expires, owner)
        while len(self.entries) > self._capacity:
            self.entries.popitem(last=False)

    def run(self, keys: Sequence[bytes], start: int, now: float) -> tuple[int, float]:
        """Leading pending chunks from index `start`, and when the last of them is ready."""
        entries, count, ready = self.entries, 0, now
        if not entries:
            return 0, now
        for index in range(start, len(keys)):
            entry = entries.get(keys[index])
            if entry is None or entry[1] <= now:
                break
            count += 1
            ready = max(ready, entry[0])
        return count, ready

    def committed(self, keys: Iterable[bytes]) -> None:
        """The feed reported the keys."""
        if self.entries:
            for key in keys:
                self.entries.pop(key, None)

    def drop(self, keys: Iterable[bytes], owner: str) -> None:
        """The owner failed or was cancelled before it computed them."""
        for key in keys:
            entry = self.entries.get(key)
            if entry is not None and entry[2] == owner:
                del self.entries[key]

    def expire(self, now: float) -> None:
        """Forget entries whose time is over."""
        gone = [key for key, entry in self.entries.items() if entry[1] <= now]
        for key in gone:
            del self.entries[key]

    def clear(self) -> None:
        """The replica went away."""
        self.entries.clear()
