"""Pauses in streamed answers while feeds are busy: all in one process, and mind and relay apart."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil
import uvloop

from bench import harness
from bench.load import LAST, READ_BYTES, request
from bench.router import chat_body
from kvist_connector.testing.ports import free_port

GOAL_MS = 5.0
STREAMS = 16
KEYS_PER_SECOND = 50_000
SECONDS = 3.0
WORDS = 50
FORMS = {"one process": "0", "mind and one relay": "1"}


@dataclass(frozen=True)
class Trial:
    """Some seconds of streams."""

    p50_ms: float
    p99_ms: float
    keys_per_second: float
    cores: float  # of all processes of the router


class Router:
    """One form of it, with an engine and a feed of its own."""

    def __init__(self, port: int, feed: str, process: subprocess.Popen[bytes]) -> None:
        self._port, self._feed = port, feed
        self._process = psutil.Process(process.pid)

    def trial(self, keys_per_second: int, snapshot: bool) -> Trial:
        """Streams while the feed says so much; `snapshot`: the feed begins anew in the middle."""
        httpx.post(f"{self._feed}/rate", params={"keys": keys_per_second})
        timer = threading.Timer(SECONDS / 2, self._new_snapshot)
        if snapshot:
            timer.start()
        sent, used, began = self._sent(), self._used(), time.monotonic()
        gaps = uvloop.run(_streams(self._port))
        took = time.monotonic() - began
        rate, cores = (self._sent() - sent) / took, (self._used() - used) / took
        httpx.post(f"{self._feed}/rate", params={"keys": 0})
        timer.cancel()
        p50, p99 = (1000 * harness.percentile(gaps, share) for share in (0.5, 0.99))
        return Trial(p50, p99, rate, cores)

    def _new_snapshot(self) -> None:
        httpx.post(f"{self._feed}/snapshot")

    def _sent(self) -> int:
        return int(httpx.get(f"{self._feed}/sent").json()["keys"])

    def _used(self) -> float:
        found = [self._process, *self._process.children(recursive=True)]
        return sum(item.cpu_times().user + item.cpu_times().system for item in found)


def run(options: harness.Options) -> harness.Result:
    """p99 pause between pieces of 16 streams, feeds idle and busy in turn, both forms in turn."""
    rounds, rate = options.rounds(6, 1), options.extra.keys
    trials: dict[tuple[str, bool], list[Trial]] = {}
    with contextlib.ExitStack() as stack:
        routers = {form: stack.enter_context(_router(relays)) for form, relays in FORMS.items()}
        for number in range(rounds):
            for form, router in routers.items():
                for busy in (False, True) if number % 2 else (True, False):
                    found = router.trial(rate if busy else 0, busy)
                    trials.setdefault((form, busy), []).append(found)
    rises = {
        form: harness.estimate([
            loud.p99_ms - calm.p99_ms
            for loud, calm in zip(trials[form, True], trials[form, False], strict=True)
        ])
        for form in FORMS
    }  # fmt: skip
    return harness.Result(
        headline="p99 pause rises by "
        + ", ".join(f"{rise.median:.1f} ms ({form})" for form, rise in rises.items()),
        tables=(
            harness.Table(
                f"Pauses in {STREAMS} streams of a piece every 20 ms",
                ("form", "feed", "p50 ms", "p99 ms", "keys/s", "cores of the router"),
                tuple(_row(form, busy, found) for (form, busy), found in sorted(trials.items())),
                "Engine, feed and client share the machine's cores with the router. Busy: chunks come and go "
                "by 16, and in the middle the feed begins anew with 200,000.",
            ),
        ),
        figures={form: [trial.p99_ms for trial in trials[form, True]] for form in FORMS},
        goals=tuple(
            harness.Goal(f"{form}: rise of the p99 pause", rise.median, GOAL_MS, unit=" ms",
                         interval=(rise.low, rise.high))
            for form, rise in rises.items()
        ),
    )  # fmt: skip


def _row(form: str, busy: bool, found: list[Trial]) -> tuple[str, ...]:
    p50, p99, rate, cores = (
        harness.percentile(values, 0.5)
        for values in zip(*((t.p50_ms, t.p99_ms, t.keys_per_second, t.cores) for t in found), strict=True)
    )
    return form, "busy" if busy else "idle", f"{p50:.1f}", f"{p99:.1f}", f"{rate:.0f}", f"{cores:.2f}"


async def _streams(port: int) -> list[float]:
    """Pauses in all streams."""
    bodies = [request(port, "/v1/chat/completions", chat_body(seed, WORDS)) for seed in range(STREAMS)]
    found = await asyncio.gather(*(_stream(port, body) for body in bodies))
    return [gap for gaps in found for gap in gaps]


async def _stream(port: int, data: bytes) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    gaps: list[float] = []
    try:
        async with asyncio.timeout(SECONDS + 60):
            writer.write(data)
            before, end = None, time.monotonic() + SECONDS
            while (now := time.monotonic()) < end:
                piece = await reader.read(READ_BYTES)
                if not piece or piece.endswith(LAST):
                    break
                now = time.perf_counter()
                if before is not None:
                    gaps.append(now - before)
                before = now
    finally:
        writer.close()
    return gaps


@contextlib.contextmanager
def _router(relays: str) -> Iterator[Router]:
    with contextlib.ExitStack() as stack:
        engine, feed, port = free_port(), free_port(), free_port()
        for role, at in (("engine", engine), ("feed", feed)):
            _start(stack, ["bench.gap_parts", role, "--port", str(at)])
        replica = f"http://127.0.0.1:{engine},agent=http://127.0.0.1:{feed}"
        router = ["kvist_router", "--replica", replica, "--port", str(port), "--admin-port", "0"]
        process = _start(stack, [*router, "--relays", relays, "--log-level", "warning"])
        limit = time.monotonic() + 120
        while not _ready(port):
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError("the router did not become ready")
            time.sleep(0.1)
        yield Router(port, f"http://127.0.0.1:{feed}", process)


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _start(stack: contextlib.ExitStack, module: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", *module])
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)
    return process


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", type=int, default=KEYS_PER_SECOND, help="updates of the feed a second")


if __name__ == "__main__":
    sys.exit(harness.main("gap", run, _flags))
