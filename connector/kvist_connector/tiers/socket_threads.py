"""Moves much through a socket in a thread. Used by peer_connection.py and agent/peer_api.py.

The kernel wakes an event loop for every piece that fits into a socket's buffer; a thread sleeps until all
of it has passed, so nobody's lookup waits for the copies between.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import select
import socket
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
    return await _in_thread(sock, lambda: _receive(sock, view, seen))


async def send_file(sock: socket.socket, file: int, offset: int, length: int) -> int:
    """Bytes of a file sent by the kernel: less than `length` only when the file ends.

    The socket is one that does not block. Whoever gives up ends the connection, as above.
    """
    return await _in_thread(sock, lambda: _send(sock, file, offset, length))


async def _in_thread(sock: socket.socket, work: Callable[[], int]) -> int:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()

    def run() -> None:
        try:
            count = work()
        except OSError as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, count)

    # threading.Thread waits until the thread has begun: on busy cores the loop would wait with it.
    _thread.start_new_thread(run, ())
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        _interrupt(sock)
        while not done.done():
            await asyncio.wait([done])
        done.exception()  # nobody's any more
        raise


def _receive(sock: socket.socket, view: memoryview, seen: Seen | None) -> int:
    count = 0
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
    return count


def _send(sock: socket.socket, file: int, offset: int, length: int) -> int:
    poll, sent = select.poll(), 0
    poll.register(sock, select.POLLOUT)
    while sent < length:
        poll.poll()
        try:
            count = os.sendfile(sock.fileno(), file, offset + sent, length - sent)
        except BlockingIOError:
            continue
        if not count:
            break
        sent += count
    return sent


def _interrupt(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself
