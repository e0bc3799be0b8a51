"""Reading a request's body within its limits. Called by relay/app.py."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Receive

from kvist_router.errors import Refused
from kvist_router.mind.interface import Refusal


class ClientGone(Exception):  # noqa: N818 - a state, not a fault
    """The client closed its connection."""


async def read_body(receive: Receive, headers: Iterable[tuple[bytes, bytes]], most: int) -> bytes:
    """The whole body; raises Refused for one that is too long, ClientGone. The caller has the deadline."""
    lengths = {value for name, value in headers if name == b"content-length"}
    if len(lengths) > 1:
        raise Refused(Refusal(400, "two different Content-Length headers", code="conflicting_lengths"))
    for length in lengths:
        if length.isdigit() and int(length) > most:
            raise Refused(_too_long(most))
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > most:
            raise Refused(_too_long(most))
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_long(most: int) -> Refusal:
    return Refusal(413, f"the body is longer than the limit of {most} bytes", code="body_too_long")
