"""A cache agent in a process of its own for benches and long tests: start, records, clear, flush, kill."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from kvist_connector import names
from kvist_connector.protocol import feed
from kvist_connector.protocol.engine import RequestRecord
from kvist_connector.protocol.framing import FrameDecoder, FrameError
from kvist_connector.testing.ports import free_port

START_SECONDS = 60
RECORD_SECONDS = 20
END_SECONDS = 30


class AgentProcess:
    """Starts the agent and reads its feed for request records.

    `more`: further flags; `program`: what runs in place of the agent's own module; `records`: whether the
    feed is read, by a thread of this process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        memory: str = "2Gi",
        disk: str = "",
        kv_events: str = "",
        more: Sequence[str] = (),
        program: Sequence[str] = ("kvist_connector",),
        records: bool = True,
    ) -> None:
        self._reads_records = records
        self._program = program
        self.folder = folder
        self.socket = folder / "agent.sock"
        self.arena = Path("/dev/shm") / f"kvist-bench-{os.getpid()}-{folder.name}.arena"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = ["--replica", "bench", "--socket", str(self.socket), "--arena", str(self.arena)]
        self._arguments += ["--memory", memory, "--http.port", str(self.port)]
        if disk:
            self._arguments += ["--disk.path", str(folder / "disk"), "--disk.size", disk]
        if kv_events:
            self._arguments += ["--kv-events", kv_events]
        self._arguments += more
        self._records: queue.Queue[RequestRecord] = queue.Queue(maxsize=10_000)
        self._log = (folder / "agent.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start (again) and wait until it is ready; also reads the feed from then on."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", *self._program, *self._arguments],
            stdout=self._log,
            stderr=self._log,
        )
        limit = time.monotonic() + START_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"agent not ready:\n{(self.folder / 'agent.log').read_text()[-4000:]}")
            time.sleep(0.05)
        if self._reads_records:
            threading.Thread(target=self._read_feed, name="bench-feed", daemon=True).start()

    def record(self) -> RequestRecord:
        """The next request record; raises queue.Empty at the deadline."""
        return self._records.get(timeout=RECORD_SECONDS)

    def forget_records(self) -> None:
        """Drop what has been read so far."""
        while not self._records.empty():
            self._records.get_nowait()

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """One control call."""
        answer = httpx.post(self.url + path, json=body, timeout=60)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def stats(self) -> dict[str, Any]:
        """The agent's counters."""
        found: dict[str, Any] = httpx.get(self.url + names.PATH_STATS, timeout=10).json()
        return found

    def private_bytes(self) -> int:
        """Memory of the process that is no file's: the arena does not count."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    def flush(self) -> None:
        """Wait until everything stored is on disk."""
        left = self.post(names.PATH_FLUSH, deadline=60)
        if left["pending_chunks"]:
            raise RuntimeError(f"write-behind did not finish: {left}")

    def clear(self, tier: str) -> dict[str, Any]:
        """Empty a tier."""
        return self.post(names.PATH_CLEAR, tier=tier)

    def kill(self) -> None:
        """kill -9: nothing is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_SECONDS)

    def close(self) -> None:
        """End the agent and remove its arena."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()
        for path in self.arena.parent.glob(self.arena.name + "*"):
            if path.is_dir():  # of lock files, empty once the workers are gone
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self) -> bool:
        try:
            return httpx.get(self.url + names.PATH_READYZ, timeout=2).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _read_feed(self) -> None:
        """One stream after another while the process lives: an engine that registers starts a new epoch."""
        process = self._process
        while process is not None and process.poll() is None:
            decoder: FrameDecoder[feed.FeedMessage] = FrameDecoder(feed.FeedMessage)
            with contextlib.suppress(httpx.HTTPError, FrameError):
                self._read_stream(decoder)
            time.sleep(0.05)

    def _read_stream(self, decoder: FrameDecoder[feed.FeedMessage]) -> None:
        with httpx.stream(
            "GET", self.url + names.PATH_FEED, params={"reader": "bench"}, timeout=None
        ) as stream:
            for piece in stream.iter_raw():
                for message in decoder.feed(piece):
                    if isinstance(message, feed.Record) and not self._records.full():
                        self._records.put_nowait(message.record)
