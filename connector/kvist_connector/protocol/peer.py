"""What agents say to each other on their peer ports: which chunks are in your arena, and give me one.

    POST PATH_PEER_ASK             body: Question             answer: Sizes, one a name, in order
    GET  PATH_PEER_CHUNKS/<name>   name in hexadecimal        answer: the object, whole; 404: not there

Both with the cluster's bearer token. A name is what a shared tier calls a chunk (scope, then key), the
object what it would hold: envelope header, then the bytes of every rank. The reader verifies all of
it. A connection's next request says that what came before has been read; until then the
sender keeps it in its arena for a moment, since the kernel sends from the arena's own pages.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvist_connector.protocol.engine import Message

MAX_NAMES: Final = 1024
MAX_NAME_BYTES: Final = 32
# Of a Question or a Sizes at most, encoded.
MAX_BODY_BYTES: Final = 64 * 1024
CONTENT_TYPE: Final = "application/x-kvist-peer"

Name = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]


class Question(Message, frozen=True):
    """Which of these are in the arena?"""

    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMES)]


class Sizes(Message, frozen=True):
    """Bytes of each object, None where there is none."""

    sizes: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0)] | None, ...], msgspec.Meta(max_length=MAX_NAMES)
    ]


def name_of(text: str) -> bytes | None:
    """A name from hexadecimal; None when it is none."""
    try:
        name = bytes.fromhex(text)
    except ValueError:
        return None
    return name if 0 < len(name) <= MAX_NAME_BYTES and name.hex() == text else None
