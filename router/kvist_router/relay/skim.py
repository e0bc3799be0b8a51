"""A long JSON body without its long strings: what of it has to be in memory. Pure; called by relay/body.py.

A body of many megabytes is pictures and sounds in a few strings, of which routing needs nothing. They are cut
out while the body passes by, a mark stands in their place, `expand` puts them back into what the edits left.
Whether the rest is JSON is for the mind to see; what was cut, for the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from os import urandom
from typing import Final

LONG_STRING_BYTES: Final = 2**20
_QUOTE, _BACKSLASH = b'"', 0x5C
_INSIDE: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)

Range = tuple[int, int]  # of the body: first byte, and the one after the last


class TooMuchError(Exception):
    """What is left without long strings is more than allowed."""


class Skimmer:
    """`feed` all pieces in order, then `text`. At most `most` bytes are kept; raises TooMuchError."""

    def __init__(self, most: int, long_string: int = LONG_STRING_BYTES) -> None:
        self._most, self._long = most, long_string
        self._mark = f"kvist-{urandom(16).hex()}-"
        self._kept: list[bytes] = []
        self._size = 0
        self._offset = 0  # of the piece at hand
        self._begin = -1  # of the string that we are in; -1: in none
        self._string: list[bytes] = []
        self._string_size = 0
        self._escaped = False  # the piece before ended with a backslash
        self._cuts: list[Range] = []

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self._size + min(self._string_size, self._long)

    def feed(self, piece: bytes) -> None:
        """The next bytes of the body."""
        position = 0
        while position < len(piece):
            position = (
                self._string_in(piece, position) if self._begin >= 0 else self._between(piece, position)
            )
        self._offset += len(piece)

    def text(self) -> bytes:
        """The body with a mark in place of every long string."""
        if self._begin >= 0:
            self._close(self._offset)  # it does not end: no JSON, as the mind will say
        return b"".join(self._kept)

    def expand(self, edited: bytes) -> Iterator[bytes | Range]:
        """An edited text in pieces: its own bytes, and ranges of the body for the marks in it."""
        position = 0
        for number, cut in enumerate(self._cuts):
            mark = self._name(number)
            found = edited.find(mark, position)
            if found >= 0:
                yield edited[position:found]
                yield cut
                position = found + len(mark)
        yield edited[position:]

    def _between(self, piece: bytes, position: int) -> int:
        quote = piece.find(_QUOTE, position)
        end = len(piece) if quote < 0 else quote + 1
        self._keep(piece[position:end])
        if quote >= 0:
            self._begin = self._offset + end
        return end

    def _string_in(self, piece: bytes, position: int) -> int:
        """The part of a string from `position` on: where it ends."""
        match = _INSIDE.match(piece, position + self._escaped)
        end = match.end() if match else len(piece)
        self._escaped = False
        if (
            end < len(piece) and piece[end] == _BACKSLASH
        ):  # the last byte: what it escapes comes with the next
            self._escaped, end = True, len(piece)
        if self._string_size <= self._long:
            self._string.append(piece[position:end])
        self._string_size += end - position
        if self._string_size > self._long:
            self._string.clear()
        if end == len(piece):
            return end
        self._close(self._offset + end)
        self._keep(_QUOTE)
        return end + 1

    def _close(self, end: int) -> None:
        if self._string_size > self._long:
            self._keep(self._name(len(self._cuts)))
            self._cuts.append((self._begin, end))
        else:
            for part in self._string:
                self._keep(part)
        self._string.clear()
        self._begin, self._string_size = -1, 0

    def _name(self, number: int) -> bytes:
        return f"{self._mark}{number:08x}".encode()

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._most:
            raise TooMuchError
        self._kept.append(data)
