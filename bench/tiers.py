"""Lower tiers against the plainest way to move the same bytes to the same files and servers.

    python -m bench.tiers [--json FILE] [--check] [--quick] [--lmcache PROGRAM]

Sixteen chunks of SmolLM2-135M (5.9 MB each, 94 MB) are put and got through the envelope, eight at a time:
header, checksum, breaker and metering included. Beside them, in the same rounds and as many at a time: plain
writes and reads of whole files with the same flags, the same with a checksum ("disk, checked"), redis-py and
obstore as they are, and a download over sendfile from a process that does nothing else. The other figure is
how long the event loop was held at worst: the lookups of all requests wait for it. LMCache's figures are
those of its own `bench l2`.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from bench import harness, lmcache
from bench.harness import Goal, Options, Result, Table, estimate
from bench.tier_servers import AT_ONCE, CHUNK_BYTES, CHUNKS, Tier, tiers
from bench.tier_ways import Way
from kvist_connector.testing import services
from kvist_connector.testing.fake_engine import content

GOAL: Final = 0.8
STALL_GOAL: Final = 0.02
LMCACHE_TIERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "disk": ("fs", {"type": "fs"}),
    "disk, direct": ("fs, O_DIRECT", {"type": "fs", "use_odirect": True}),
    "redis": ("resp", {"type": "resp", "host": "127.0.0.1"}),
}


async def one_round(
    tier: Tier, number: int, data: Sequence[memoryview], into: Sequence[memoryview]
) -> dict[str, float]:
    """Seconds of ours and the plain way, and the loop's worst stall during ours."""
    # Fresh keys in every round: a put of what is there would send nothing.
    keys = [bytes([number]) * 15 + bytes([index]) for index in range(CHUNKS)] if tier.writable else tier.keys
    if tier.anew is not None:
        await tier.anew()
    expected = data if tier.writable else [content(key, 0, CHUNK_BYTES) for key in keys]
    seconds: dict[str, float] = {}

    async def measured(way: Way, label: str) -> None:
        stalls = Stalls()
        stalls.begin()
        if tier.writable:
            seconds[f"{label}put"] = await timed(
                lambda pair: way.put(*pair), list(zip(keys, data, strict=True))
            )
        found: dict[bytes, Any] = {}

        async def get(pair: tuple[bytes, memoryview]) -> None:
            found[pair[0]] = await way.get(*pair)

        seconds[f"{label}get"] = await timed(get, list(zip(keys, into, strict=True)))
        stalls.end()
        seconds[f"{label}stall"] = stalls.worst
        if any(bytes(found[key]) != bytes(view) for key, view in zip(keys, expected, strict=True)):
            raise RuntimeError(f"{tier.name}: other bytes came back")
        if tier.writable:
            for key in keys:
                await way.delete(key)

    ways = [(tier.ours, ""), (tier.plain, "plain ")]
    for way, label in ways if number % 2 else reversed(ways):
        await measured(way, label)
    return seconds


async def timed(act: Callable[[tuple[bytes, memoryview]], Awaitable[object]], pairs: Iterable[Any]) -> float:
    """Seconds for all of them, AT_ONCE at a time."""
    queue = iter(pairs)

    async def work() -> None:
        for pair in queue:
            await act(pair)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return time.perf_counter() - began


class Stalls:
    """How late the loop was at worst between `begin` and `end`."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Watch from now on."""
        self._task = asyncio.create_task(self._watch())

    def end(self) -> None:
        """What comes is the bench's own doing."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.001
            await asyncio.sleep(0.001)
            self.worst = max(self.worst, loop.time() - due)


async def measure(options: Options) -> tuple[dict[str, list[dict[str, float]]], dict[str, dict[str, float]]]:
    """By tier: every round's figures, and LMCache's MB/s."""
    # Whole pages of their own, as slots of an arena are.
    data = [memoryview(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(CHUNKS)]
    into = [memoryview(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(CHUNKS)]
    for view in data:
        view[:] = os.urandom(CHUNK_BYTES)
    found: dict[str, list[dict[str, float]]] = {}
    theirs: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        async with AsyncExitStack() as stack:
            present = await tiers(Path(folder), stack, options.extra.only)
            for number in range(options.rounds(9, 2) + 1):
                for tier in present:
                    seconds = await one_round(tier, number, data, into)
                    if number:  # the first opens connections and touches pages
                        found.setdefault(tier.name, []).append(seconds)
            if options.extra.lmcache:
                for tier in present:
                    if tier.name in LMCACHE_TIERS:
                        theirs[tier.name] = _lmcache(options.extra.lmcache, Path(folder), tier)
    return found, theirs


def run(options: Options) -> Result:
    """Lower tiers against plain ways to the same files and servers."""
    found, theirs = asyncio.run(measure(options))
    size = CHUNKS * CHUNK_BYTES / 1e6
    goals: list[Goal] = []
    figures: dict[str, float] = {}
    rows = []
    for name, rounds in found.items():
        cells = [name]
        for way in ("put", "get"):
            cells += _cells(name, way, size, rounds, goals, figures)
        stall = estimate([each["stall"] for each in rounds])
        figures[f"{name} loop stall ms"] = 1000 * stall.median
        goals.append(Goal(f"{name} loop stall", stall.median, STALL_GOAL, unit=" s"))
        rows.append((*cells, f"{1000 * stall.median:.1f}"))
    columns = ("tier", "put MB/s", "plain", "ratio", "get MB/s", "plain", "ratio", "loop held ms")
    note = (
        f"{CHUNKS} chunks of {CHUNK_BYTES / 1e6:.1f} MB, {AT_ONCE} at a time; ratio: our speed over the plain"
        " way's, in pairs. Files are read from the page cache, but for direct ones."
    )
    tables = [Table("Lower tiers", columns, tuple(rows), note)]
    tables += [_beside(theirs, figures)] if theirs else []
    absent = [services.missing()] if services.missing() else []
    absent += [] if options.extra.lmcache else [lmcache.ABSENT]
    worst = min(goal.value for goal in goals if goal.at_least)
    return Result(
        f"tiers run at {worst:.0%} of the plain way's speed or better",
        tuple(tables),
        figures,
        tuple(goals),
        tuple(absent),
    )


def _cells(
    name: str,
    way: str,
    size: float,
    rounds: Sequence[dict[str, float]],
    goals: list[Goal],
    figures: dict[str, float],
) -> list[str]:
    if way not in rounds[0]:
        return ["", "", ""]
    ratio = estimate([each[f"plain {way}"] / each[way] for each in rounds])
    speed = estimate([size / each[way] for each in rounds]).median
    plain = estimate([size / each[f"plain {way}"] for each in rounds]).median
    figures |= {f"{name} {way} MB/s": speed, f"{name} {way} plain MB/s": plain}
    interval = (ratio.low, ratio.high)
    goals.append(Goal(f"{name} {way} / plain", ratio.median, GOAL, at_least=True, interval=interval))
    return [f"{speed:.0f}", f"{plain:.0f}", f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"]


def _lmcache(program: Path, folder: Path, tier: Tier) -> dict[str, float]:
    _, adapter = LMCACHE_TIERS[tier.name]
    # Of each its own: what lies in the folder already is not written again.
    where = {"port": tier.port} if tier.port else {"base_path": str(folder / f"lmcache {tier.name}")}
    return lmcache.tier_bench(program, folder, adapter | where, CHUNKS, CHUNK_BYTES // 1024)


def _beside(theirs: dict[str, dict[str, float]], figures: dict[str, float]) -> Table:
    rows = []
    for name, found in theirs.items():
        cells = [name, LMCACHE_TIERS[name][0]]
        for way, operation in (("put", "Store"), ("get", "Load")):
            speed = found.get(operation)
            cells += [f"{figures[f'{name} {way} MB/s']:.0f}", "failed" if speed is None else f"{speed:.0f}"]
            if speed is not None:
                figures[f"{name} {way}, LMCache MB/s"] = speed
        rows.append(tuple(cells))
    return Table(
        f"Beside LMCache {lmcache.VERSION}",
        ("tier", "its adapter", "put MB/s", "its store", "get MB/s", "its load"),
        tuple(rows),
        f"`lmcache bench l2`, {CHUNKS} keys of the same size at once, means of three rounds, on the same disk"
        " and server, after our rounds.",
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    lmcache.add_argument(parser)
    parser.add_argument("--only", action="append", help="this tier alone; repeatable")


if __name__ == "__main__":
    sys.exit(harness.main("tiers", run, _arguments))
