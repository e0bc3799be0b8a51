"""Frames: a little-endian u32 length, then that many bytes of msgpack.

Used by the agent's socket, its clients and the feed. A frame above the limit is
refused before its bytes are read, so a broken peer cannot make us allocate.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024
HEADER_BYTES = 4

M = TypeVar("M")
_LENGTH = struct.Struct("<I")


class FrameError(ValueError):
    """Bytes that are not a frame of the expected messages; close the connection."""


def encode(message: object) -> bytes:
    """One whole frame."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"message of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Length of the body after a 4-byte header; raises FrameError above the limit."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {length} bytes is above the limit of {MAX_FRAME_BYTES}")
    return int(length)


class FrameDecoder(Generic[M]):
    """Turns a byte stream in any pieces into messages of one union type."""

    def __init__(self, message_type: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Messages completed by `data`; raises FrameError on anything else."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= HEADER_BYTES:
                length = body_length(bytes(self._buffer[position : position + HEADER_BYTES]))
                end = position + HEADER_BYTES + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[position + HEADER_BYTES : end])
                position = end
                yield self.decode(body)
        finally:
            del self._buffer[:position]

    def decode(self, body: bytes) -> M:
        """One message from the body of a frame."""
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise FrameError(f"not a message of this protocol: {error}") from error
