"""A program for the supervisor's tests: a health endpoint and a temper. Run as a file, not collected.

    fake_program.py PORT JOURNAL NAME TEMPER [FILE]

Every start, flush and SIGTERM is a line in JOURNAL, so that tests can see an order.
Tempers: good; broken (exits at once); once (healthy the first time, then broken; FILE remembers);
stubborn (ignores SIGTERM); parent (has a child whose pid is written to FILE); mute (never healthy).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType


def note(text: str) -> None:
    with Path(sys.argv[2]).open("a") as journal:
        journal.write(f"{sys.argv[3]} {text}\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(503 if sys.argv[4] == "mute" else 200, b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        note("flush")
        self._answer(200, b'{"pending_chunks": 0, "pending_bytes": 0}')

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def on_term(_: int, __: FrameType | None) -> None:
    note("term")
    if sys.argv[4] != "stubborn":
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, on_term)
    temper = sys.argv[4]
    if temper == "broken" or (temper == "once" and Path(sys.argv[5]).exists()):
        print("no such flag: --nonsense", flush=True)
        sys.exit(3)
    if temper == "once":
        Path(sys.argv[5]).touch()
    if temper == "parent":
        child = subprocess.Popen(["sleep", "600"])
        Path(sys.argv[5]).write_text(str(child.pid))
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    note("start")
    server.serve_forever()


if __name__ == "__main__":
    main()
