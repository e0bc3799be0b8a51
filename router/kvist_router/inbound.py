"""uvicorn's HTTP/1.1 connection with limits on what comes before a request is there. Called by server.py.

Without them a client that sends headers byte by byte holds its connection for ever, and one that never ends
them fills the memory. What is no HTTP is answered in OpenAI's form, as everything else. An offer to change
the protocol (`Upgrade: h2c`, which the JDK's client makes with its first request) is declined by going on in
HTTP/1.1, as RFC 9110, 7.8 has it; the parser would take the body for the other protocol's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvist_router.mind.interface import Refusal
from kvist_router.relay.answers import error_body
from kvist_router.settings import LimitSettings

_OFFERS: Final = frozenset({b"upgrade", b"http2-settings"})


class Inbound(HttpToolsProtocol):
    """One client's connection. `head_seconds` begin with the connection, later with a head's first byte."""

    head_seconds = 10.0
    head_bytes = 2**16

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._heads = 0  # whole ones so far
        self._in_body = False
        self._bytes = 0  # of the head that is coming, or since the body's last byte
        self._body_came = False  # with the bytes at hand
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
        heads, began_in_body, self._body_came = self._heads, self._in_body, False
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(_NO_HTTP)
        if self._in_body != began_in_body or heads != self._heads or self.transport.is_closing():
            return
        self._bytes = 0 if self._body_came else self._bytes + len(data)
        if self._bytes > self.head_bytes:
            self._refuse(_TOO_LONG)
        elif self._timer is None and not self._in_body:
            self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of the head. Trailers are left out: whoever checked the head has not seen them."""
        if not self._in_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A part of the body: what came with it is no head and no trailer, or little of one."""
        self._body_came = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """A request is there."""
        if self.parser.should_upgrade():
            return  # its head is parsed once more without the offer
        self._disarm()
        self._heads, self._in_body, self._bytes = self._heads + 1, True, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Its body is whole."""
        if self.parser.should_upgrade():
            return
        self._in_body, self._bytes = False, 0
        super().on_message_complete()

    def _feed(self, data: bytes) -> None:
        """Parse; raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("this is no proxy") from None
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in _without_offer(self.headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n"

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

    @property
    def _answering(self) -> bool:
        """Whether bytes of an answer are out, or one to an earlier request is due."""
        cycle = self.cycle
        begun = cycle is not None and cycle.response_started and not cycle.response_complete
        return begun or bool(self.pipeline)

    def _refuse(self, refusal: Refusal) -> None:
        if self.transport.is_closing():
            return
        if self._answering:  # its client would read this as a part of that answer
            self.transport.close()
            return
        body = error_body(refusal)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[refusal.status] + head + body)
        self.transport.close()


def _without_offer(headers: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"connection":
            kept = [item.strip() for item in value.split(b",") if item.strip().lower() not in _OFFERS]
            if kept:
                yield name, b", ".join(kept)
        elif name not in _OFFERS:
            yield name, value


def inbound(limits: LimitSettings) -> type[Inbound]:
    """The connections of a server with these limits."""
    own = {"head_seconds": limits.head_seconds, "head_bytes": limits.head_bytes}
    return type("Inbound", (Inbound,), own)


_NO_HTTP = Refusal(400, "the request is not HTTP/1.1 as it should be", code="invalid_http")
_TOO_SLOW = Refusal(408, "the headers did not arrive in time", "timeout_error", code="request_timeout")
_TOO_LONG = Refusal(431, "the headers are too long", code="headers_too_long")
