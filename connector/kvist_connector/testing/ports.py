"""Ports for servers that a test or a bench starts a moment later.

Port 0 is no good for that: what the kernel handed out and got back it hands to the next connection of
anyone on the machine, and the server that comes for it cannot listen. These lie below the range it hands out.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from random import SystemRandom
from typing import Final

FIRST: Final = 10_000  # below are ports of well-known servers, ours too
_HANDED_OUT: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_START: Final = 32_768
_TRIES: Final = 1_000


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now, which no outgoing connection will take. Raises RuntimeError."""
    return free_ports(1, host=host)[0]


def free_ports(count: int, run: int = 1, host: str = "127.0.0.1") -> list[int]:
    """`count` such ports, each the first of `run` neighbouring ones; none is named twice."""
    found: list[int] = []
    random, end = SystemRandom(), _handed_out_from() - run
    for _ in range(_TRIES):
        if len(found) == count:
            return found
        port = random.randrange(FIRST, end)
        if all(abs(port - other) >= run for other in found) and _free(host, port, run):
            found.append(port)
    raise RuntimeError(
        f"no {count} x {run} free ports between {FIRST} and {end} of {host}; end what uses them"
    )


def _handed_out_from() -> int:
    try:
        first = int(_HANDED_OUT.read_text().split()[0])
    except OSError:
        return _USUAL_START
    # A machine may hand out nearly all; then nothing is safe, and the usual place is as good as any.
    return first if first > 2 * FIRST else _USUAL_START


def _free(host: str, port: int, run: int) -> bool:
    with ExitStack() as stack:
        for one in range(port, port + run):
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind((host, one))
            except OSError:
                return False
    return True
