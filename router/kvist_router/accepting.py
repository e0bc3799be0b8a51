"""Connections of a listening socket that several processes share, one at a time. Called by server.py.

A loop's own server takes all that wait as soon as it wakes, so the relay that wakes first would have a whole
burst of clients for as long as they stay. Here each takes one and looks again: who is busy takes fewer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

PAUSE_SECONDS = 1.0  # when no file descriptor is left
_log = logging.getLogger(__name__)


class Acceptor:
    """`close` and `wait_closed` are those of an asyncio.Server."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._taken: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Take no more."""
        self._loop.remove_reader(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Until those that were taken have become connections."""
        await asyncio.gather(*self._taken, return_exceptions=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was quicker, or the client has left
        except OSError as error:
            _log.error("no connection can be taken: %s; again in %g s", error.strerror, PAUSE_SECONDS)
            self._loop.remove_reader(self._listener.fileno())
            self._pause = self._loop.call_later(
                PAUSE_SECONDS, self._loop.add_reader, self._listener.fileno(), self._accept
            )
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(connection))
        self._taken.add(task)
        task.add_done_callback(self._taken.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)
        except OSError as error:  # of TLS, too: asyncio's deadline of a handshake is a ConnectionError
            _log.debug("a connection did not come to be: %s", error)
            connection.close()
