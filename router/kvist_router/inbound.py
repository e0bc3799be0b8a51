"""uvicorn's HTTP/1.1 connection with limits on what comes before a request is there. Called by server.py.

Without them a client that sends headers byte by byte holds its connection for ever, and one that never ends
them fills the memory. What is no HTTP is answered in OpenAI's form, as everything else.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvist_router.mind.interface import Refusal
from kvist_router.relay.answers import error_body
from kvist_router.settings import LimitSettings


class Inbound(HttpToolsProtocol):
    """One client's connection. `head_seconds` begin with the connection, later with a head's first byte."""

    head_seconds = 10.0
    head_bytes = 2**16

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._heads = 0  # whole ones so far
        self._in_body = False
        self._bytes = 0  # of the head that is coming
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or a body."""
        heads, began_in_body = self._heads, self._in_body
        super().data_received(data)
        if self._in_body or began_in_body or heads != self._heads or self.transport.is_closing():
            return
        self._bytes += len(data)
        if self._bytes > self.head_bytes:
            self._refuse(_TOO_LONG)
        elif self._timer is None:
            self._arm()

    def on_headers_complete(self) -> None:
        """A request is there."""
        self._disarm()
        self._heads, self._in_body, self._bytes = self._heads + 1, True, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Its body is whole."""
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(Refusal(400, "the request is not HTTP/1.1 as it should be", code="invalid_http"))

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(_TOO_SLOW)

    def _refuse(self, refusal: Refusal) -> None:
        if self.transport.is_closing():
            return
        body = error_body(refusal)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[refusal.status] + head + body)
        self.transport.close()


def inbound(limits: LimitSettings) -> type[Inbound]:
    """The connections of a server with these limits."""
    own = {"head_seconds": limits.head_seconds, "head_bytes": limits.head_bytes}
    return type("Inbound", (Inbound,), own)


_TOO_SLOW = Refusal(408, "the headers did not arrive in time", "timeout_error", code="request_timeout")
_TOO_LONG = Refusal(431, "the headers are too long", code="headers_too_long")
