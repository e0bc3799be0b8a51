"""What routers tell each other: frames (kvist_connector.protocol.framing) of one HTTP stream.

Opening first, then all that runs at this moment as Dispatched (and Prefilled), then events as they happen.
There are no sequence numbers: TCP loses nothing in between, and a reader that is too slow is cut off and
begins anew.
Later versions may append fields; what a version means by the present ones never changes.
"""

from __future__ import annotations

import math
from typing import Final

from kvist_connector.keys import KEY_BYTES
from kvist_connector.protocol.engine import Message
from kvist_router.errors import FeedError

VERSION: Final = 1
CONTENT_TYPE: Final = "application/x-kvist-dispatches"
MAX_KEYS: Final = 1024  # leading chunks of a dispatch that are told
MAX_NAME: Final = 256  # characters of an id or a name
MAX_TOKENS: Final = 2**31
MAX_SECONDS: Final = 3600.0


class Opening(Message, frozen=True):
    """First frame. `instance` is random: a router that reads itself notices."""

    version: int
    router: str
    instance: bytes


class Dispatched(Message, frozen=True):
    """A request was sent to a replica."""

    request: str
    replica: str
    tokens: int  # of its prompts that the replica computes
    ready: float  # seconds from now until its prefill is over, as predicted
    keys: bytes  # leading chunks of its prompts, joined
    held: int  # how many of them the replica had


class Prefilled(Message, frozen=True):
    """Its prefill is over."""

    request: str


class Ended(Message, frozen=True):
    """It has ended, whatever way."""

    request: str


class Beat(Message, frozen=True):
    """Nothing has happened for a while."""


Said = Opening | Dispatched | Prefilled | Ended | Beat


def check(message: Said) -> None:
    """Raise FeedError for what no router says: its figures go into costs, its lengths into memory."""
    if isinstance(message, Beat):
        return
    names = [message.router] if isinstance(message, Opening) else [message.request]
    if isinstance(message, Dispatched):
        names.append(message.replica)
        count, rest = divmod(len(message.keys), KEY_BYTES)
        if rest or count > MAX_KEYS or not 0 <= message.held <= count:
            raise FeedError(f"{len(message.keys)} bytes of keys, {message.held} held")
        if not 0 <= message.tokens <= MAX_TOKENS:
            raise FeedError(f"{message.tokens} tokens")
        if not (math.isfinite(message.ready) and 0 <= message.ready <= MAX_SECONDS):
            raise FeedError(f"ready in {message.ready} seconds")
    if isinstance(message, Opening) and message.version != VERSION:
        raise FeedError(f"version {message.version} of dispatches, this router reads {VERSION}")
    if any(len(name) > MAX_NAME for name in names):
        raise FeedError(f"a name of more than {MAX_NAME} characters")
