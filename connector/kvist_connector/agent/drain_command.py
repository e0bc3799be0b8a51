"""`python -m kvist_connector drain`: the preStop of the engine's container. Waits, and says what was left."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvist_connector.agent.control_socket import control_path
from kvist_connector.errors import AgentGone
from kvist_connector.names import PATH_DRAIN
from kvist_connector.quantity import format_bytes

CONNECT_SECONDS = 5.0  # an agent that is being restarted is waited for this long
RETRY_SECONDS = 0.25
SLACK_SECONDS = 5.0  # of the answer beyond the deadline
_EXAMPLES = """examples:
  python -m kvist_connector drain --socket /run/kvist/agent.sock --deadline 600
  python -m kvist_connector drain --socket /run/kvist/agent.sock --undo"""


def run(arguments: Sequence[str]) -> int:
    """0 when drained or at the deadline, 1 when no agent answers."""
    parser = argparse.ArgumentParser(
        prog="python -m kvist_connector drain",
        description="Let the routers send new requests elsewhere, running ones end, and what is cached here "
        "reach the lower tiers; returns when that is done or at the deadline.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--socket", type=Path, required=True, help="the agent's socket, as the engine uses it"
    )
    parser.add_argument("--deadline", type=_seconds, default=60.0, help="seconds to wait at most; default 60")
    parser.add_argument("--undo", action="store_true", help="take a drain back")
    given = parser.parse_args(arguments)
    try:
        left = drain(given.socket, given.deadline, given.undo)
    except AgentGone as error:
        sys.stderr.write(f"kvist drain: {error}\n")
        return 1
    sys.stdout.write(f"kvist drain: {describe(left)}\n")
    return 0


def drain(
    path: Path,
    deadline: float,
    undo: bool = False,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """The agent's last answer (agent/drain.py `Left`); an agent that restarts meanwhile is told again."""
    begin, reached = clock(), False
    while True:
        remaining = max(0.0, begin + deadline - clock())
        try:
            return _ask(control_path(path), {"undo": True} if undo else {"deadline": remaining}, remaining)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            if clock() - begin >= (max(deadline, CONNECT_SECONDS) if reached else CONNECT_SECONDS):
                raise AgentGone(f"no agent answers at {path}: is it running?") from error
        except (OSError, http.client.HTTPException) as error:
            reached = True
            if remaining <= 0:
                raise AgentGone(f"the agent at {path} broke off: {error}") from error
        pause(RETRY_SECONDS)


def describe(left: dict[str, Any]) -> str:
    """An answer in a line."""
    if not left["draining"]:
        return "taken back, requests are welcome"
    parts = []
    if left["routers"]:
        parts.append(f"routers that have not acknowledged: {', '.join(left['routers'])}")
    if left["requests"]:
        parts.append(f"{left['requests']} requests running")
    if left["chunks"]:
        parts.append(f"{left['chunks']} chunks ({format_bytes(left['bytes'])}) not written")
    return f"at the deadline there were left: {'; '.join(parts)}" if parts else "done"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not within 0 to 86400 seconds")
    return seconds


def _ask(path: Path, body: dict[str, object], seconds: float) -> dict[str, Any]:
    connection = _UnixConnection(path, seconds + SLACK_SECONDS)
    try:
        connection.request("POST", PATH_DRAIN, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status == 503:  # the arena is still being reserved
            raise ConnectionRefusedError(text.decode(errors="replace"))
        if answer.status != 200:
            raise AgentGone(f"the agent answers {answer.status}: {text.decode(errors='replace')[:300]}")
        found: dict[str, Any] = json.loads(text)
        return found
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """To the socket's file."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
