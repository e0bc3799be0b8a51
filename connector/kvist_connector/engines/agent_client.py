"""The connection of one half of an engine to its agent. Torch-free.

Used by the scheduler half and by every worker half. A thread of its own connects,
receives and reconnects with back-off; `send` never blocks: what the socket does not take
at once waits in a bounded buffer for that thread. An agent that stays away or stops
reading costs the engine nothing but its cache.

Handler methods run on the client's thread, in this order per connection:
`opened(welcome)`, `received(message)`..., `closed(reason)`.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvist_connector.errors import AgentGone
from kvist_connector.protocol.engine import PROTOCOL_VERSION, Refused, ToAgent, ToEngine, Welcome
from kvist_connector.protocol.framing import FrameDecoder, FrameError, encode

logger = logging.getLogger(__name__)
RECEIVE_BYTES = 1 << 18


class Handler(Protocol):
    """What the owner of a connection implements; called on the client's thread."""

    def opened(self, welcome: Welcome) -> None:
        """The agent accepted this connection; all state of an earlier one is void."""

    def received(self, message: ToEngine) -> None:
        """Any later message."""

    def closed(self, reason: str) -> None:
        """The connection that was opened is gone."""


@dataclass(frozen=True)
class ClientTimes:
    """Seconds and bytes of a client; tests shorten them."""

    first_retry: float = 0.05
    last_retry: float = 2.0
    connect: float = 2.0
    welcome: float = 10.0
    unsent_bytes: int = 16 * 1024 * 1024


class AgentClient:
    """A self-healing connection. `start` once, `close` once.

    `revive` is called when nobody listens at `path`; `wait` pauses between attempts and
    ends early when the event is set (tests put a fake clock there).
    """

    def __init__(
        self,
        path: Path,
        greeting: Callable[[], Sequence[ToAgent]],
        handler: Handler,
        name: str,
        times: ClientTimes | None = None,
        revive: Callable[[], None] | None = None,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self._path = path
        self._revive = revive
        self._wait = wait
        self._greeting = greeting
        self._handler = handler
        self._times = times or ClientTimes()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._accepted = False  # may send
        self._opened = False  # welcomed; the handler knows
        self._stopping = threading.Event()
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"kvist-{name}", daemon=True)
        self._last_refusal = ""

    def start(self) -> None:
        """Begin connecting; returns at once."""
        self._thread.start()

    def send(self, message: ToAgent) -> bool:
        """Hand over a message; False when there is no accepted connection to take it."""
        frame = encode(message)
        with self._lock:
            if not self._accepted or self._socket is None:
                return False
            return self._push(self._socket, frame)

    def close(self, timeout: float = 5.0) -> None:
        """Disconnect; calling again does nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._wake_receive.close()
        self._wake_send.close()

    # ---- on the caller's thread, lock held

    def _push(self, sock: socket.socket, frame: bytes) -> bool:
        if self._unsent:
            return self._buffer(frame)
        try:
            sent = sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False  # the client's thread sees it too and reconnects
        return sent == len(frame) or self._buffer(frame[sent:])

    def _buffer(self, rest: bytes) -> bool:
        if len(self._unsent) + len(rest) > self._times.unsent_bytes:
            self._accepted = False  # half a frame may be out: this connection is over
            self._unsent.clear()
            self._wake()
            return False
        self._unsent += rest
        self._wake()
        return True

    def _wake(self) -> None:
        try:
            self._wake_send.send(b"\0")
        except BlockingIOError:
            return  # enough wake-ups are waiting

    # ---- on the client's thread

    def _run(self) -> None:
        delay = self._times.first_retry
        while not self._stopping.is_set():
            try:
                sock = self._connect()
            except OSError:
                if self._revive is not None:
                    self._revive()
                self._wait(self._stopping, delay)
                delay = min(2 * delay, self._times.last_retry)
                continue
            reason, welcomed = self._serve(sock)
            if welcomed:
                delay = self._times.first_retry
                if not self._stopping.is_set():
                    logger.warning("Kvist agent gone (%s): serving uncached, reconnecting", reason)
            self._wait(self._stopping, delay)
            delay = min(2 * delay, self._times.last_retry)

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self._times.connect)
            sock.connect(str(self._path))
            for message in self._greeting():
                sock.sendall(encode(message))
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock

    def _serve(self, sock: socket.socket) -> tuple[str, bool]:
        """One connection until its end: why it ended, and whether it was ever accepted."""
        reason = "closed by the engine"
        with self._lock:
            self._socket = sock
            self._unsent.clear()
        try:
            self._receive_all(sock)
        except (AgentGone, FrameError, OSError) as error:
            reason = str(error)
        with self._lock:
            welcomed, self._accepted, self._socket = self._opened, False, None
            self._opened = False
        sock.close()
        if welcomed:
            self._handler.closed(reason)
        return reason, welcomed

    def _receive_all(self, sock: socket.socket) -> None:
        decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
        deadline = time.monotonic() + self._times.welcome
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receive, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            while not self._stopping.is_set():
                self._await_events(selector, sock, deadline)
                for message in decoder.feed(_receive(sock)):
                    self._dispatch(message)

    def _await_events(self, selector: selectors.BaseSelector, sock: socket.socket, deadline: float) -> None:
        with self._lock:
            writing = bool(self._unsent)
        selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0))
        timeout = None if self._opened else max(0.0, deadline - time.monotonic())
        if not selector.select(timeout) and not self._opened:
            raise AgentGone(f"no welcome within {self._times.welcome} s")
        _drain(self._wake_receive)
        with self._lock:
            if self._opened and not self._accepted:
                raise AgentGone("the agent does not read its socket")
            self._flush(sock)

    def _flush(self, sock: socket.socket) -> None:
        if not self._unsent:
            return
        try:
            del self._unsent[: sock.send(self._unsent)]
        except BlockingIOError:
            return

    def _dispatch(self, message: ToEngine) -> None:
        if isinstance(message, Refused):
            if message.reason != self._last_refusal:
                logger.error("Kvist agent refuses this engine: %s", message.reason)
            self._last_refusal = message.reason
            raise AgentGone(f"refused: {message.reason}")
        if not isinstance(message, Welcome):
            self._handler.received(message)
            return
        if message.protocol != PROTOCOL_VERSION:
            raise AgentGone(f"agent speaks protocol {message.protocol}, this engine {PROTOCOL_VERSION}")
        self._last_refusal = ""
        with self._lock:
            self._opened = self._accepted = True
        self._handler.opened(message)


def _receive(sock: socket.socket) -> bytes:
    try:
        data = sock.recv(RECEIVE_BYTES)
    except BlockingIOError:
        return b""
    if not data:
        raise AgentGone("the agent closed the connection")
    return data


def _drain(sock: socket.socket) -> None:
    try:
        sock.recv(4096)
    except BlockingIOError:
        return
