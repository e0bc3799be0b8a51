"""Reading a request's body within its limits: in memory, or if it is long in a file. Called by relay/app.py.

    up to `limits.body_memory_bytes`   as it came, all of it is looked at
    up to `limits.body_bytes`          in a file (spool.py); the mind sees it without long strings (skim.py)

All bodies of a process together have `limits.bodies_memory_bytes` of memory and `limits.spool_bytes` of disk.
Who finds no room is refused at once: a client that waits holds what it has sent already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Message, Receive

from kvist_router.errors import Refused
from kvist_router.mind.interface import Refusal
from kvist_router.relay.skim import Skimmer, TooMuchError
from kvist_router.relay.spool import Spool, Streamed
from kvist_router.settings import LimitSettings

_log = logging.getLogger(__name__)


class ClientGone(Exception):  # noqa: N818 - a state, not a fault
    """The client closed its connection."""


@dataclass(slots=True)
class Room:
    """Bytes that are taken now."""

    memory: int = 0
    disk: int = 0


class Body:
    """What came. `close` it in every case: that gives its room back."""

    def __init__(self, room: Room, limits: LimitSettings) -> None:
        self.text = b""  # what the mind reads
        self._room, self._limits = room, limits
        self._memory = self._disk = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._long: tuple[Spool, Skimmer] | None = None

    @property
    def skimmed(self) -> bool:
        """Whether `text` lacks long strings."""
        return self._long is not None

    def outgoing(self, edited: bytes) -> bytes | Streamed:
        """What goes to an engine; `edited` is `text` after edits."""
        if self._long is None:
            return edited
        spool, skimmer = self._long
        return Streamed(spool, list(skimmer.expand(edited)))

    def close(self) -> None:
        """It is of no use any more."""
        self._room.memory -= self._memory
        self._room.disk -= self._disk
        self._memory = self._disk = 0
        if self._long is not None:
            self._long[0].close()

    async def add(self, piece: bytes) -> None:
        """More of it; raises Refused."""
        self._size += len(piece)
        if self._size > self._limits.body_bytes:
            raise Refused(_too_long(self._limits.body_bytes))
        if self._long is None:
            self._take_memory(self._size)
            self._pieces.append(piece)
            if self._size > self._limits.body_memory_bytes:
                await self.put_away()
        else:
            await self._write(piece, *self._long)

    async def put_away(self) -> None:
        """From now on it is in a file; raises Refused."""
        self._long = Spool(), Skimmer(self._limits.body_memory_bytes)
        for piece in self._pieces:
            await self._write(piece, *self._long)
        self._pieces.clear()

    async def finish(self) -> None:
        """That was all."""
        if self._long is None:
            self.text = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        else:
            self.text = self._long[1].text()
            await self._long[0].flush()
        self._pieces.clear()

    async def _write(self, piece: bytes, spool: Spool, skimmer: Skimmer) -> None:
        if self._room.disk + len(piece) > self._limits.spool_bytes:
            raise Refused(_NO_ROOM)
        self._disk += len(piece)
        self._room.disk += len(piece)
        skimmer.feed(piece)
        self._take_memory(skimmer.size)
        await spool.write(piece)

    def _take_memory(self, size: int) -> None:
        more = size - self._memory
        if more > 0 and self._room.memory + more > self._limits.bodies_memory_bytes:
            raise Refused(_NO_ROOM)
        self._memory += more
        self._room.memory += more


class Bodies:
    """All bodies of a process."""

    def __init__(self) -> None:
        self.room = Room()

    async def read(
        self, receive: Receive, headers: Iterable[tuple[bytes, bytes]], limits: LimitSettings
    ) -> Body:
        """A whole body; raises Refused, ClientGone. The caller has the deadline."""
        length = _checked_length(headers, limits.body_bytes)
        body, whole = Body(self.room, limits), False
        try:
            if length > limits.body_memory_bytes:
                await body.put_away()
            await _receive(receive, body)
            whole = True
            return body
        except TooMuchError as error:
            raise Refused(_too_much(limits.body_memory_bytes)) from error
        except OSError as error:
            _log.warning("no room for long bodies: %s; TMPDIR names the folder", error.strerror or error)
            raise Refused(_NO_ROOM) from error
        finally:
            if not whole:
                body.close()


async def read_body(receive: Receive, headers: Iterable[tuple[bytes, bytes]], most: int) -> bytes:
    """A whole body that is small enough to be in memory; raises as `Bodies.read`."""
    _checked_length(headers, most)
    pieces, size, more = [], 0, True
    while more:
        piece, more = _part(await receive())
        size += len(piece)
        if size > most:
            raise Refused(_too_long(most))
        pieces.append(piece)
    return b"".join(pieces)


async def _receive(receive: Receive, body: Body) -> None:
    more = True
    while more:
        piece, more = _part(await receive())
        await body.add(piece)
    await body.finish()


def _part(message: Message) -> tuple[bytes, bool]:
    """Bytes of a body, and whether more follow."""
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


def _checked_length(headers: Iterable[tuple[bytes, bytes]], most: int) -> int:
    """The stated length; 0 where none is stated."""
    lengths = {value for name, value in headers if name == b"content-length"}
    if len(lengths) > 1:
        raise Refused(Refusal(400, "two different Content-Length headers", code="conflicting_lengths"))
    for length in lengths:
        if length.isdigit() and int(length) > most:
            raise Refused(_too_long(most))
    return max((int(length) for length in lengths if length.isdigit()), default=0)


def _too_long(most: int) -> Refusal:
    return Refusal(413, f"the body is longer than the limit of {most} bytes", code="body_too_long")


def _too_much(most: int) -> Refusal:
    return Refusal(
        413, f"the body has more than {most} bytes beside strings of over 1 MiB", code="body_too_long"
    )


_NO_ROOM = Refusal(
    503,
    "the router has no room for another long body",
    "service_unavailable",
    code="overloaded",
    retry_after=1,
)
