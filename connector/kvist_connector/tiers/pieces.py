"""Bytes in and out of a caller's buffers piece by piece, so that no copy holds the loop for long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvist_connector.tiers.base import Buffer

# A copy of this size takes about a millisecond.
PIECE_BYTES = 4 * 1024 * 1024
_SEEN_BYTES = 512 * 1024


class Filler:
    """Fills buffers in turn; what does not fit is left out."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._left = [view.cast("B") for view in into if view.nbytes]
        self.room = sum(view.nbytes for view in self._left)

    def put(self, data: Buffer, seen: Callable[[memoryview], None] | None = None) -> None:
        """Copy what comes next; `seen` is told of each piece while it is in a core's cache."""
        source = memoryview(data).cast("B")
        most = source.nbytes if seen is None else _SEEN_BYTES
        while source.nbytes and self._left:
            count = min(source.nbytes, self._left[0].nbytes, most)
            self._left[0][:count] = source[:count]
            if seen is not None:
                seen(self._left[0][:count])
            self.room -= count
            source = source[count:]
            rest = self._left[0][count:]
            self._left[:1] = [rest] if rest.nbytes else []


def copies(parts: Sequence[Buffer], size: int = PIECE_BYTES) -> Iterator[bytes]:
    """Copies of the parts in pieces of at most `size` bytes: a transport may keep what it was given."""
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, view.nbytes, size):
            yield bytes(view[start : start + size])
