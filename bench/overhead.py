"""What a router costs: Kvist, the Rust router of vLLM and no router, on engines that answer at once.

    python -m bench.overhead [--vllm-router ENVIRONMENT/bin/vllm-router] [--grid whole] [--pieces FOLDER]

Prompts of 50 and 4,000 words of which 0, 10 or 100 % are new with every request, streamed and not, 16 and 256
connections, 2 and 64 engines. `--grid short` (default) leaves out what says little: see `points`. Each piece
(one contestant on one number of engines, all points) is kept in `--pieces`: what is there is done.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bench import harness
from bench import overhead_programs as programs
from bench.overhead_programs import Cores, NoStartError, NotHereError
from bench.prompts import model_folder

OURS, DIRECT = "Kvist", "direct"
PEERS = {"kv_aware": "vllm-router kv_aware", "cache_aware": "vllm-router cache_aware",
         "round_robin": "vllm-router round_robin"}  # fmt: skip
KV_AWARE, CACHE_AWARE = PEERS["kv_aware"], PEERS["cache_aware"]
ABSENT = (
    "vllm-router 0.1.17, the Rust router of the vLLM project: pip install vllm-router==0.1.17 into an "
    "environment of its own, then --vllm-router ENVIRONMENT/bin/vllm-router"
)
GOAL_KV_AWARE, GOAL_CACHE_AWARE, GOAL_P99, GOAL_GROWTH = 1.2, 1.0, 1.0, 1.05
SECONDS, WARM_SECONDS = 1.5, 0.3
MEMORY_REQUESTS, MEMORY_WARM_REQUESTS, MEMORY_CONNECTIONS = 200_000, 20_000, 64
GIVE_UP = 3  # points in a row that a contestant did not serve


@dataclass(frozen=True)
class Point:
    """One load."""

    words: int
    fresh: int  # per cent of new text
    stream: bool
    connections: int
    engines: int

    @property
    def flags(self) -> list[object]:
        """Of `mock load`."""
        stream = ["--stream"] if self.stream else []
        return ["--words", self.words, "--fresh", self.fresh, "--connections", self.connections, *stream]

    @property
    def label(self) -> str:
        """As a table and the pieces name it."""
        kind = "stream" if self.stream else "whole"
        return f"{self.words} words, {self.fresh} % new, {kind}, {self.connections} conn."


def points(grid: str, engines: int) -> list[Point]:
    """All of them, or: 2 engines with 16 connections in full, 64 with 256, streamed and without 10 % new."""
    every = [
        Point(*rest, engines)
        for rest in product((50, 4000), (0, 10, 100), (False, True), (16, 256))
    ]  # fmt: skip
    if grid == "whole":
        return every
    if grid == "quick":
        return [item for item in every if item.stream and item.connections == 16 and item.fresh == 0]
    if engines == 2:
        return [item for item in every if item.connections == 16]
    return [item for item in every if item.connections == 256 and item.stream and item.fresh != 10]


# ---- measuring


class Bench:
    """All contestants, one at a time, so that none disturbs another."""

    def __init__(self, options: harness.Options, mock: Path, folder: Path) -> None:
        self._mock, self._folder = mock, folder
        self._peer: Path | None = options.extra.vllm_router
        self._grid = "quick" if options.quick else options.extra.grid
        self._cores = Cores.split()
        self._seconds = 0.5 if options.quick else SECONDS
        self._requests = 4_000 if options.quick else MEMORY_REQUESTS
        self._rounds = options.rounds(2, 1)

    @property
    def contestants(self) -> list[str]:
        """Those that are here."""
        return [DIRECT, OURS, *(PEERS.values() if self._peer is not None else ())]

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Every round turns the order round."""
        for engines in (2, 64):
            for number in range(self._rounds):
                order = self.contestants if number % 2 == 0 else self.contestants[::-1]
                for name in order:
                    yield self._kept(name, engines, number)

    def memory(self, name: str) -> dict[str, Any]:
        """Bytes before and after many requests of new text."""
        return self._load_or(f"memory-{_slug(name)}.json", lambda: self._grow(name))

    def _kept(self, name: str, engines: int, number: int) -> dict[str, Any]:
        return self._load_or(f"{_slug(name)}-{engines}-{number}.json", lambda: self._piece(name, engines))

    def _load_or(self, name: str, measure: Any) -> dict[str, Any]:
        path = self._folder / name
        if not path.exists():
            print(f"--- {path.stem}", flush=True)
            path.write_text(json.dumps(measure(), indent=1) + "\n")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def _piece(self, name: str, engines: int) -> dict[str, Any]:
        piece: dict[str, Any] = {"name": name, "engines": engines, "points": {}, "problem": ""}
        with programs.engines(self._mock, engines, self._cores) as ports:
            try:
                if name == DIRECT:
                    self._measure(piece, points(self._grid, engines), ports, None)
                    return piece
                with self._router(name, ports) as router:
                    self._measure(piece, points(self._grid, engines), [router.port], router)
            except NoStartError as error:
                piece["problem"] = str(error)
        return piece

    def _router(self, name: str, ports: Sequence[int]) -> Any:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        log = self._folder / f"{_slug(name)}.log"
        if name == OURS:
            return programs.router(programs.kvist(urls, model_folder()), "/readyz", self._cores, log)
        assert self._peer is not None
        policy = next(key for key, value in PEERS.items() if value == name)
        return programs.router(programs.vllm_router(self._peer, urls, policy), "/health", self._cores, log)

    def _measure(
        self, piece: dict[str, Any], load: list[Point], ports: Sequence[int], router: programs.Router | None
    ) -> None:
        failed = 0
        for point in load:
            programs.load(self._mock, ports, self._cores, "--seconds", WARM_SECONDS, *point.flags)
            before = 0.0 if router is None else router.processor_seconds()
            found = programs.load(self._mock, ports, self._cores, "--seconds", self._seconds, *point.flags)
            used = 0.0 if router is None else router.processor_seconds() - before
            piece["points"][point.label] = {**found, "processor_s": used}
            failed = failed + 1 if found["failed"] else 0
            if failed == GIVE_UP:
                piece["problem"] = found["problem"]
                return

    def _grow(self, name: str) -> dict[str, Any]:
        flags = ["--words", 50, "--fresh", 100, "--connections", MEMORY_CONNECTIONS, "--seconds", 0]
        with programs.engines(self._mock, 2, self._cores) as ports, self._router(name, ports) as router:
            sizes, failed = [], 0
            for number, share in enumerate((0.1, 0.4, 0.5)):
                count = round(share * self._requests)
                found = programs.load(
                    self._mock,
                    [router.port],
                    self._cores,
                    "--requests",
                    count,
                    "--seed",
                    10_000 * number,
                    *flags,
                )
                failed += found["failed"]
                sizes.append(router.memory())
        return {"name": name, "bytes": sizes, "requests": self._requests, "failed": failed}


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")


# ---- saying


class Found:
    """All pieces; figures by contestant, engines and point."""

    def __init__(self, pieces: Sequence[dict[str, Any]]) -> None:
        self._pieces = pieces

    def values(self, name: str, engines: int, label: str, figure: str) -> list[float]:
        """One per round, in their order; none where a request failed."""
        chosen = [piece["points"].get(label) for piece in self._pieces
                  if (piece["name"], piece["engines"]) == (name, engines)]  # fmt: skip
        return [_figure(point, figure) for point in chosen if point and not point["failed"]]

    def ratio(self, other: str, figure: str, fresh: int | None = None) -> list[tuple[str, float]]:
        """Of ours to another's at every point that both served."""
        found = []
        for engines, label in self.places():
            mine = self.values(OURS, engines, label, figure)
            theirs = self.values(other, engines, label, figure)
            if mine and theirs and (fresh is None or f", {fresh} % new" in label):
                found.append((f"{label}, {engines} engines", median(mine) / median(theirs)))
        return found

    def places(self) -> list[tuple[int, str]]:
        """Engines and label of every point, in order."""
        return list(
            dict.fromkeys((piece["engines"], label) for piece in self._pieces for label in piece["points"])
        )

    @property
    def problems(self) -> list[str]:
        """Contestants that did not run or stopped serving."""
        return list(dict.fromkeys(
            f"{piece['name']} with {piece['engines']} engines: {piece['problem']}"
            for piece in self._pieces if piece["problem"]
        ))  # fmt: skip


def _figure(point: dict[str, Any], figure: str) -> float:
    if figure == "rate":
        return float(point["requests"] / point["seconds"])
    if figure == "processor_ms":
        return float(1000 * point["processor_s"] / point["requests"])
    return float(1000 * point[f"ttft_{figure}_s"])


def tables(found: Found, names: Sequence[str]) -> tuple[harness.Table, ...]:
    """One for each number of engines."""
    made = []
    for engines in sorted({place[0] for place in found.places()}):
        rows = [
            _row(found, name, engines, label)
            for place, label in found.places() if place == engines
            for name in names
        ]  # fmt: skip
        made.append(harness.Table(
            f"{engines} engines",
            ("load", "router", "req/s", "TTFT p50 ms", "p99 ms", "processor ms per request"),
            tuple(row for row in rows if row),
            "Medians over rounds; TTFT is the time to the first byte of an answer's body.",
        ))  # fmt: skip
    return tuple(made)


def _row(found: Found, name: str, engines: int, label: str) -> tuple[str, ...]:
    figures = ("rate", "p50", "p99", "processor_ms")
    every = [found.values(name, engines, label, figure) for figure in figures]
    if not every[0]:
        return ()
    rate, p50, p99, processor = (median(values) for values in every)
    return (
        label,
        name,
        f"{rate:.0f}",
        f"{p50:.2f}",
        f"{p99:.2f}",
        "" if name == DIRECT else f"{processor:.3f}",
    )


def _worst(name: str, ratios: list[tuple[str, float]], limit: float, at_least: bool) -> list[harness.Goal]:
    """The goal at the point where it is missed by most: it is meant at every one."""
    if not ratios:
        return []
    label, value = (min if at_least else max)(ratios, key=lambda pair: pair[1])
    return [harness.Goal(f"{name}, worst of {len(ratios)}: {label}", value, limit, at_least, "x")]


def goals(found: Found, memory: Sequence[dict[str, Any]]) -> list[harness.Goal]:
    """As docs/benchmarks.md states them."""
    made = _worst("req/s against kv_aware", found.ratio(KV_AWARE, "rate"), GOAL_KV_AWARE, True)
    made += _worst(
        "req/s against cache_aware, 0 % new", found.ratio(CACHE_AWARE, "rate", 0), GOAL_CACHE_AWARE, True
    )
    made += _worst(
        "TTFT p99 against cache_aware, 0 % new", found.ratio(CACHE_AWARE, "p99", 0), GOAL_P99, False
    )
    for item in memory:
        if item["name"] == OURS:
            growth = item["bytes"][-1] / item["bytes"][1]
            made.append(
                harness.Goal("memory after all requests / after half", growth, GOAL_GROWTH, False, "x")
            )
    return made


def memory_table(memory: Sequence[dict[str, Any]]) -> harness.Table:
    """Sizes along the way."""
    rows = tuple(
        (item["name"], *(f"{size / 2**20:.0f}" for size in item["bytes"])) for item in memory
    )  # fmt: skip
    whole = memory[0]["requests"] if memory else 0
    columns = ("router", *(f"MiB after {share * whole:,.0f} requests" for share in (0.1, 0.5, 1.0)))
    return harness.Table("Memory: 50 words, all new", columns, rows)


def run(options: harness.Options) -> harness.Result:
    """Every contestant at every point; memory of ours and of cache_aware over 200,000 requests."""
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as scratch:
        folder = options.extra.pieces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            bench = Bench(options, programs.build(Path(scratch)), folder)
        except NotHereError as error:
            return harness.Result(headline=f"not measured: {error}", absent=(str(error),))
        found = Found(list(bench.pieces()))
        memory = [bench.memory(name) for name in (OURS, CACHE_AWARE) if name in bench.contestants]
    return _result(found, memory, bench.contestants)


def _result(found: Found, memory: list[dict[str, Any]], names: list[str]) -> harness.Result:
    ratios = {name: found.ratio(name, "rate") for name in names if name not in (OURS, DIRECT)}
    parts = [
        f"{min(v for _, v in pairs):.2f} to {max(v for _, v in pairs):.2f} of {name}"
        for name, pairs in ratios.items() if pairs
    ]  # fmt: skip
    cores = Cores.split()
    return harness.Result(
        headline="req/s: " + ("; ".join(parts) or "Kvist and no peer"),
        tables=(*tables(found, names), memory_table(memory)),
        figures={"ratio": ratios, "memory": memory},
        goals=tuple(goals(found, memory)),
        absent=() if len(names) > 2 else (ABSENT,),
        notes=(
            f"Routers have core {_spell(cores.router)}, engines and load core {_spell(cores.rest)}; "
            "one router at a time. Kvist routes by exact tokens of its own, the engines have no agent.",
            *found.problems,
        ),
    )


def _spell(cores: tuple[int, ...]) -> str:
    return ", ".join(map(str, cores))


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vllm-router", type=Path, metavar="PROGRAM", help="measure this peer's policies as well"
    )
    parser.add_argument("--grid", choices=["short", "whole"], default="short", help="how many points")
    parser.add_argument(
        "--pieces", type=Path, metavar="FOLDER", help="keep what was measured, go on from there"
    )


if __name__ == "__main__":
    sys.exit(harness.main("overhead", run, _flags))
