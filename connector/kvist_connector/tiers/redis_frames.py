"""Bounds what a Redis server's answer may claim to be, before the parser believes it.

A header of eleven bytes makes the parser allocate a list of a thousand million places, which the garbage
collector then walks through for minutes. Whatever is asked here has answers of a few thousand elements.
Used by `redis_server`.
"""

from __future__ import annotations

from typing import Any, Final

from redis.asyncio.connection import DefaultParser
from redis.exceptions import InvalidResponse

# A list of keys has as many as were asked for, or what one bucket of the server's table holds.
MOST_ELEMENTS: Final = 1 << 20
_MOST_BULK: Final = 1 << 30
_LONGEST_LINE: Final = 1 << 16
_SIZED: Final = {ord("*"): MOST_ELEMENTS, ord("$"): _MOST_BULK}


class Frames:
    """Follows answers through any cut of their bytes; the bytes of values are skipped, not looked at."""

    def __init__(self) -> None:
        self._skip = 0  # bytes of a value that are still to come
        self._line = b""  # the beginning of a header line

    def check(self, data: bytes) -> None:
        """The next bytes. Raises InvalidResponse."""
        position = self._skip
        while position < len(data):
            end = data.find(b"\n", position)
            if end < 0:
                self._line += data[position:]
                if len(self._line) > _LONGEST_LINE:
                    raise InvalidResponse("a line without an end")
                position = len(data)
                break
            line, self._line = self._line + data[position:end], b""
            position = end + 1 + _value_bytes(line)
        self._skip = position - len(data)


def _value_bytes(line: bytes) -> int:
    """Bytes that follow a header line as its value; raises InvalidResponse when it claims too much."""
    kind = line[0] if line else 0
    if kind not in _SIZED:
        return 0
    try:
        size = int(line[1:])
    except ValueError as error:
        raise InvalidResponse(f"{line[:20]!r} is no length") from error
    if size > _SIZED[kind]:
        raise InvalidResponse(f"an answer of {size} elements or bytes was never asked for")
    return size + 2 if kind == ord("$") and size >= 0 else 0


class BoundedParser(DefaultParser):  # type: ignore[misc, valid-type, unused-ignore]
    """The client's own parser, whose input is checked before."""

    _reader: Any

    def on_connect(self, connection: Any) -> None:
        """A new connection has new answers."""
        super().on_connect(connection)
        self._reader = _CheckedReader(self._reader)


class _CheckedReader:
    def __init__(self, reader: Any) -> None:
        self._frames = Frames()
        self._feed = reader.feed
        self.gets = reader.gets
        self.has_data = reader.has_data

    def feed(self, data: bytes) -> None:
        self._frames.check(data)
        self._feed(data)
