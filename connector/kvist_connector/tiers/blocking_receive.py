"""Receives much from a socket in a thread. Used by peer_connection.py.

The kernel wakes an event loop for every piece that fits into a socket's buffer; a thread sleeps until all
of it is there, so nobody's lookup waits for the copies between.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Final

# Below, starting a thread costs more than it saves.
LEAST_BYTES: Final = 512 * 1024
_PIECE_BYTES: Final = 1024 * 1024  # stays in a core's cache
Seen = Callable[[memoryview], None]


async def receive_all(sock: socket.socket, view: memoryview, seen: Seen | None = None) -> int:
    """Bytes received: less than the view has room for only when the connection ended.

    `seen` is told of each piece, in the thread. Whoever gives up ends the connection: the thread has let go
    of the view when this returns.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()
    thread = threading.Thread(
        target=_receive, args=(loop, done, sock, view, seen), name="receive", daemon=True
    )
    thread.start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        _interrupt(sock)
        while not done.done():
            await asyncio.wait([done])
        done.exception()  # nobody's any more
        raise


def _receive(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[int],
    sock: socket.socket,
    view: memoryview,
    seen: Seen | None,
) -> None:
    count = 0
    try:
        sock.setblocking(True)
        while count < view.nbytes:
            piece = view[count : count + _PIECE_BYTES]
            came = sock.recv_into(piece, piece.nbytes, socket.MSG_WAITALL)
            if seen is not None:
                seen(piece[:came])
            count += came
            if came < piece.nbytes:
                break
        sock.setblocking(False)
    except OSError as error:
        loop.call_soon_threadsafe(done.set_exception, error)
    else:
        loop.call_soon_threadsafe(done.set_result, count)


def _interrupt(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself
