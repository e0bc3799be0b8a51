"""One engine connection: bytes to messages and back, and nothing of their meaning.

What belongs to the connection (grants, leases) hangs here and ends in `Core.gone`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from kvist_connector.agent.grants import Grants
from kvist_connector.agent.leases import LeaseBook
from kvist_connector.protocol.engine import Hello, Message, Refused, ToAgent
from kvist_connector.protocol.framing import FrameDecoder, FrameError, encode

log = logging.getLogger(__name__)
MAX_UNSENT_BYTES = 64 * 1024 * 1024


class Handler(Protocol):
    """What a session needs of the core."""

    def open(self, session: Session, hello: Hello) -> None:
        """The first message of a connection."""

    def handle(self, session: Session, message: object) -> None:
        """Every further message."""

    def gone(self, session: Session) -> None:
        """The connection ended; called once for every session that was opened."""


class Session(asyncio.Protocol):
    """Server side of one connection. All calls happen on the agent's loop."""

    def __init__(self, handler: Handler, leases: LeaseBook, grants: Grants) -> None:
        self._handler = handler
        self._decoder: FrameDecoder[ToAgent] = FrameDecoder(ToAgent)
        self._transport: asyncio.Transport | None = None
        self.hello: Hello | None = None
        self.leases = leases
        self.grants = grants
        self.registered = False

    @property
    def is_scheduler(self) -> bool:
        """Whether this is the scheduler half's connection."""
        return self.hello is not None and self.hello.role == "scheduler"

    @property
    def member(self) -> str:
        """The member id that the peer gave."""
        return self.hello.member if self.hello is not None else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for sending."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Decode and hand on; a peer that breaks the protocol is disconnected."""
        try:
            for message in self._decoder.feed(data):
                if self.hello is not None:
                    self._handler.handle(self, message)
                elif isinstance(message, Hello):
                    self.hello = message
                    self._handler.open(self, message)
                else:
                    raise FrameError(f"the first message is {type(message).__name__}, expected Hello")
                # Who is refused is not heard any more: nobody would take back what it is given.
                if self._transport is None or self._transport.is_closing():
                    return
        except (FrameError, ValueError) as error:
            log.warning("engine connection %s closed: %s", self.member or "without Hello", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone, or we closed."""
        self._transport = None
        if self.hello is not None:
            self._handler.gone(self)

    def send(self, message: Message) -> None:
        """Queue a message; a peer that does not read is disconnected, never waited for."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("engine connection %s does not read: closed", self.member)
            self._transport.abort()
            return
        self._transport.write(encode(message))

    def refuse(self, reason: str) -> None:
        """Say why, and close."""
        log.warning("engine connection %s refused: %s", self.member, reason)
        self.send(Refused(reason=reason))
        self.close()

    def close(self) -> None:
        """Close after what is queued was sent."""
        if self._transport is not None:
            self._transport.close()


SessionFactory = Callable[[], Session]
