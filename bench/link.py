"""A TCP relay whose way back is a token bucket: a link of so many bytes a second before a server.

Threads and blocking sockets, so that it carries more than a gigabyte a second beside an engine. What is asked
goes through at once; only answers, where the chunks are, are paced, all connections together.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Final, Self

BURST: Final = 256 * 1024  # bytes that pass at once after a pause
_PIECE: Final = BURST // 2
_END_SECONDS: Final = 5.0


class Bucket:
    """`rate` in bytes a second may be changed at any time."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._due = 0.0  # when the bytes taken so far have passed

    def take(self, size: int) -> None:
        """Return when so many bytes may pass."""
        with self._lock:
            now = time.monotonic()
            self._due = max(self._due, now - BURST / self.rate) + size / self.rate
            wait = self._due - now
        if wait > 0:
            time.sleep(wait)


class Link:
    """Relays to a port of this machine from the `port` it listens on."""

    def __init__(self, upstream: int, rate: float = 1e9) -> None:
        self.bucket = Bucket(rate)
        self._upstream = upstream
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for one in list(self._sockets):
            _end(one)
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._upstream))
            self._sockets |= {near, far}
            for source, target, paced in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._relay, args=(source, target, paced), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, target: socket.socket, paced: bool) -> None:
        piece = memoryview(bytearray(_PIECE))
        with contextlib.suppress(OSError):
            while count := source.recv_into(piece):
                if paced:
                    self.bucket.take(count)
                target.sendall(piece[:count])
        for one in (source, target):
            _end(one)
            self._sockets.discard(one)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
