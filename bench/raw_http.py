"""The plainest HTTP download there is: sendfile on one side, a receive into the caller's buffer on the other.

    python -m bench.raw_http FILE BYTES

serves `GET /N`, the N-th BYTES of the file, from a process of its own and prints its port. What bench.tiers
compares the peer tier with.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
_END: Final = b"\r\n\r\n"
_END_SECONDS: Final = 10.0


def main() -> None:
    """Serve until killed."""
    file, size = open(sys.argv[1], "rb"), int(sys.argv[2])  # noqa: SIM115 - as long as the process
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            connection, _ = listening.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_serve, args=(connection, file.fileno(), size), daemon=True).start()


def _serve(connection: socket.socket, file: int, size: int) -> None:
    with connection:
        while request := connection.recv(4096):
            position = int(request.split(b" ")[1][1:]) * size
            end = position + size
            connection.sendall(_HEAD % size)
            while position < end:
                position += os.sendfile(connection.fileno(), file, position, end - position)


@contextmanager
def served(path: Path, size: int) -> Iterator[int]:
    """The port of a server over a file."""
    with subprocess.Popen(
        [sys.executable, "-m", "bench.raw_http", str(path), str(size)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()
            process.wait(_END_SECONDS)


class Download:
    """One kept connection, for one thread at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))

    def get(self, number: int, into: Sequence[memoryview]) -> None:
        """Fill the buffers with the N-th piece."""
        self._socket.sendall(b"GET /%d HTTP/1.1\r\n\r\n" % number)
        head = b""
        while not head.endswith(_END):
            head += self._socket.recv(1)
        for view in into:
            if self._socket.recv_into(view, view.nbytes, socket.MSG_WAITALL) != view.nbytes:
                raise ConnectionResetError("the download was cut")

    def close(self) -> None:
        """End it."""
        self._socket.close()


if __name__ == "__main__":
    main()
