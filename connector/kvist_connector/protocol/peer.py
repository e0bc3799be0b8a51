"""What agents say to each other on their peer ports: which chunks are in your arena, and give me one.

    POST PATH_PEER_ASK             body: Question             answer: Sizes, one a name, in order
    GET  PATH_PEER_CHUNKS/<name>   name in hexadecimal        answer: the object, whole; 404: not there
    POST PATH_PEER_TAKE            body: Take, in JSON        answer: Taken; "I go: take these from me"

All with the cluster's bearer token. A name is what a shared tier calls a chunk (scope, then key), the
object what it would hold: envelope header, then the bytes of every rank. The reader verifies all of
it. A connection's next request says that what came before has been read; until then the
sender keeps it in its arena for a moment, since the kernel sends from the arena's own pages.

The rest are bodies and answers of the controls offer, take and release, by which a router moves chunks from
one replica to another.
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

# Chunks that an agent is asked to take from another at a time.
MOST_TAKEN: Final = 4096

Name = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]


class Question(Message, frozen=True):
    """Which of these are in the arena?"""

    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMES)]


class Sizes(Message, frozen=True):
    """Bytes of each object, None where there is none."""

    sizes: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0)] | None, ...], msgspec.Meta(max_length=MAX_NAMES)
    ]


class Offered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chunk that one agent has for another, in JSON: keys in hexadecimal."""

    key: str
    parent: str
    index: int


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of offer, in JSON. `port`: the peer port of whoever offers, `chunks` parents first."""

    port: int
    fingerprint: str
    chunk_tokens: int
    chunk_bytes: int
    chunks: list[Offered]


class Take(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of take, in JSON: these chunks, parents first, from the agent whose peer port is at `source`."""

    source: str
    fingerprint: str
    chunks: list[Offered]
    dry_run: bool = False


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of take, in JSON. `there`: keys of what is here now; the rest is what is new."""

    there: list[str]
    chunks: int
    tokens: int
    bytes: int
    dry_run: bool


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of release, in JSON: what went, and what is in use or pinned and stays."""

    chunks: int
    tokens: int
    bytes: int
    leased: int
    pinned: int


def name_of(text: str) -> bytes | None:
    """A name from hexadecimal; None when it is none."""
    try:
        name = bytes.fromhex(text)
    except ValueError:
        return None
    return name if 0 < len(name) <= MAX_NAME_BYTES and name.hex() == text else None
