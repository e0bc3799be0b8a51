"""Routing quality on traces: Kvist's policy beside published formulas, on a simulated cluster.

    python -m bench.routing --trace FILE [--dynamo PYTHON] [--only CELL] [--seeds 5] [--host-blocks N]
                            [--pieces FOLDER]

The simulation (bench/simulation) runs the router's own mirror, cost and policy. With `--dynamo`, the
Python of an environment that has ai-dynamo, its offline replay runs the same cells and the difference of
round robin and of its own router is the calibration error. A win is a paired 95 % interval of mean TTFT
that excludes zero and exceeds that error. Without a trace, made-up requests are used: for tuning, and for
--check, which takes minutes. `--pieces` keeps every run, so that nothing is lost when it is stopped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from bench import harness
from bench.simulation import rivals
from bench.simulation.cluster import Router, Summary, engines, simulate
from bench.simulation.engine import Engine, EngineSpec
from bench.simulation.generated import agents, conversations, documents, prompts
from bench.simulation.ours import Kvist
from bench.simulation.pieces import Pieces
from bench.simulation.trace import BLOCK_TOKENS, Request, read_trace
from kvist_router.mind.policies import policy

SPEEDS: Final = (1.0, 4.0)
SIZES: Final = (600, 2500, 10_000)
WORKERS: Final = 8
GOAL_MADE_UP: Final = 1.05  # of the best other's mean TTFT
HOST_SECONDS: Final = 64 * 2**20 / 20e9  # a block of 64 MiB at 20 GB/s
DEADLINE_SECONDS: Final = 900
NOTES: Final = (
    "The traces are Mooncake's, 512 tokens a block; the policy was tuned on made-up requests "
    "(`bench/simulation/generated.py`), then these cells were run. Formulas and parameters of the others, "
    "with their sources, are in `bench/simulation/rivals.py`.",
    "PYTHON is one that has `ai-dynamo` and `ai-dynamo-runtime` 1.6.1, whose offline replay runs the same "
    "cell: the larger of the two relative errors in mean TTFT is the cell's calibration error, and a smaller "
    "difference is a tie. A win or a loss also needs a paired 95 % interval over seeds that excludes zero.",
)
STUDENT: Final = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
_REPLAY: Final = """
import json, sys
from dynamo.replay import run_trace_replay
path, mode, speed, blocks, workers, block = sys.argv[1:]
engine = {"num_gpu_blocks": int(blocks), "block_size": int(block), "backend": "vllm",
          "worker_type": "aggregated", "max_num_batched_tokens": 8192, "max_num_seqs": 256,
          "enable_prefix_caching": True}
found = run_trace_replay(path, num_workers=int(workers), router_mode=mode, trace_block_size=int(block),
                         arrival_speedup_ratio=float(speed), extra_engine_args={"engine": engine}).summary
# Without what a preempted request finds again of itself.
print(json.dumps([found["first_admission_prefix_cache_reused_ratio"], found["mean_ttft_ms"]]))
"""

MADE_UP: Final[Mapping[str, Callable[[float], list[Request]]]] = {
    "conversations": lambda speed: conversations(0, 1.7 * speed, 400.0),
    "agents": lambda speed: agents(0, 0.4 * speed, 300.0),
    "documents": lambda speed: documents(0, 1.2 * speed, 300.0),
    "prompts": lambda speed: prompts(0, 10.0 * speed, 100.0),
}
MakeRouter = Callable[[Sequence[Engine], int], Router]
Workload = tuple[str, Path | None, tuple[int, ...]]  # name, trace, sizes of engine


def _kvist(cluster: Sequence[Engine], seed: int) -> Router:
    return Kvist(cluster, seed, policy("kvist"))


ROUTERS: Final[Mapping[str, MakeRouter]] = {
    "kvist": _kvist,
    "round robin": rivals.RoundRobin,
    "dynamo": rivals.DynamoKv,
    "llm-d precise": rivals.LlmdPrecise,
    "llm-d approximate": rivals.LlmdApproximate,
    "vllm-router": rivals.VllmCacheAware,
    "production-stack": rivals.ProductionStack,
}


@dataclass(frozen=True)
class Cell:
    """One workload on one size of engine."""

    trace: str
    path: Path | None
    speed: float
    spec: EngineSpec

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        return f"{self.trace} x{self.speed:g} {self.spec.blocks}"

    def without_host(self) -> Cell:
        """The same with the GPU's memory only."""
        return replace(self, spec=replace(self.spec, host_blocks=0, host_seconds=0.0))

    def requests(self, most: int | None) -> list[Request]:
        """Its workload."""
        if self.path is None:
            return MADE_UP[self.trace](self.speed)[:most]
        return read_trace(self.path, self.speed, most)


def run(options: harness.Options) -> harness.Result:
    """Routing quality on traces."""
    extra = options.extra
    seeds, most = (2, 400) if options.quick else (extra.seeds or (5 if extra.trace else 2), None)
    tables, goals, wins, losses, count = [], [], 0, 0, 0
    pieces = Pieces(extra.pieces)
    for cell in _cells(extra):
        requests = cell.requests(most)
        found = {name: _runs(requests, cell, name, seeds, pieces) for name in ROUTERS}
        error = 0.0
        if extra.dynamo and cell.path is not None and not options.quick:
            error, rows = _calibrated(cell.without_host(), requests, seeds, extra.dynamo, pieces)
            goals += rows
        if cell.path is None:
            goals.append(_goal(cell, found))
        table, won, lost = _table(cell, found, error)
        tables.append(table)
        wins, losses, count = wins + won, losses + lost, count + len(ROUTERS) - 1
    headline = (
        f"mean TTFT against published formulas: {wins} wins, {losses} losses, {count - wins - losses} ties"
    )
    notes = NOTES if extra.trace else ()
    figures = {"wins": wins, "losses": losses}
    return harness.Result(headline, tuple(tables), figures, tuple(goals), notes=notes)


def _goal(cell: Cell, found: dict[str, list[Summary]]) -> harness.Goal:
    means = {name: statistics.fmean(item.mean for item in runs) for name, runs in found.items()}
    best = min((name for name in means if name != "kvist"), key=means.__getitem__)
    return harness.Goal(f"{cell.name}: mean TTFT / {best}'s", means["kvist"] / means[best], GOAL_MADE_UP)


def _cells(extra: argparse.Namespace) -> list[Cell]:
    made_up: list[Workload] = [
        ("conversations", None, SIZES),
        ("agents", None, (2500,)),
        ("documents", None, (600, 2500)),
        ("prompts", None, (600,)),
    ]
    traces: list[Workload] = [(path.name.split("_")[0].split(".")[0], path, SIZES) for path in extra.trace]
    host, seconds = extra.host_blocks, HOST_SECONDS if extra.host_blocks else 0.0
    cells = [
        Cell(name, path, speed, EngineSpec(blocks, host_blocks=host, host_seconds=seconds))
        for name, path, sizes in traces or made_up for speed in SPEEDS for blocks in sizes
    ]  # fmt: skip
    return [cell for cell in cells if not extra.only or extra.only in cell.name]


def _runs(requests: list[Request], cell: Cell, name: str, seeds: int, pieces: Pieces) -> list[Summary]:
    def run(seed: int) -> Summary:
        cluster = engines(cell.spec, WORKERS)
        return simulate(requests, cluster, ROUTERS[name](cluster, seed))

    found = [
        pieces.summary(f"{cell.name} {cell.spec.host_blocks} {name} {seed}", partial(run, seed))
        for seed in range(1 if name == "round robin" else seeds)
    ]
    return found * (seeds // len(found))  # round robin draws nothing


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean of paired differences."""
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return -math.inf, math.inf
    half = STUDENT.get(count, 2.262) * statistics.stdev(differences) / math.sqrt(count)
    return mean - half, mean + half


def verdict(ours: Sequence[float], theirs: Sequence[float], error: float) -> str:
    """`win`, `loss` or `tie` of lower-is-better samples; `error` is a share of theirs."""
    low, high = paired_interval([a - b for a, b in zip(ours, theirs, strict=True)])
    least = error * statistics.fmean(theirs)
    if high < -least:
        return "win"
    return "loss" if low > least else "tie"


def _table(cell: Cell, found: dict[str, list[Summary]], error: float) -> tuple[harness.Table, int, int]:
    ours, rows, verdicts = [item.mean for item in found["kvist"]], [], []
    for name, runs in found.items():
        word = verdict(ours, [item.mean for item in runs], error) if name != "kvist" else ""
        verdicts.append(word)
        means = [statistics.fmean(getattr(item, what) for item in runs)
                 for what in ("hit", "mean", "p99", "imbalance")]  # fmt: skip
        rate = statistics.fmean(item.completed / item.seconds for item in runs)
        rows.append((name, f"{means[0]:.3f}", f"{means[1] * 1000:.0f}", f"{means[2] * 1000:.0f}",
                     f"{means[3]:.2f}", f"{rate:.2f}", word))  # fmt: skip
    columns = ("router", "hit", "mean TTFT ms", "p99 TTFT ms", "imbalance", "answers/s", "kvist")
    host = f", {cell.spec.host_blocks} in memory" if cell.spec.host_blocks else ""
    table = harness.Table(
        f"{cell.name} blocks of {BLOCK_TOKENS} tokens{host}, {WORKERS} workers, {len(ours)} seeds",
        columns, tuple(rows), f"a difference below {error:.1%} of the mean is a tie",
    )  # fmt: skip
    return table, verdicts.count("win"), verdicts.count("loss")


def _calibrated(
    cell: Cell, requests: list[Request], seeds: int, python: Path, pieces: Pieces
) -> tuple[float, list[harness.Goal]]:
    """The engine model against the replay, which is of engines without a memory tier."""
    replayed = _replays(cell, python, pieces)
    found = {name: _runs(requests, cell, name, seeds, pieces) for name in replayed}
    return _calibration(cell, found, replayed)


def _replays(cell: Cell, python: Path, pieces: Pieces) -> dict[str, tuple[float, ...]]:
    """Hit rate and mean TTFT, by router."""
    assert cell.path is not None
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.jsonl"
        data = cell.path.read_bytes()
        plain.write_bytes(gzip.decompress(data) if cell.path.suffix == ".gz" else data)
        replay = partial(_replay, python, plain, cell)
        return {
            name: pieces.numbers(f"{cell.name} replay {mode}", partial(replay, mode))
            for name, mode in (("round robin", "round_robin"), ("dynamo", "kv_router"))
        }


def _replay(python: Path, trace: Path, cell: Cell, mode: str) -> tuple[float, ...]:
    arguments = [str(trace), mode, str(cell.speed), str(cell.spec.blocks), str(WORKERS), str(BLOCK_TOKENS)]
    done = subprocess.run(
        [str(python), "-c", _REPLAY, *arguments], capture_output=True, text=True, check=True,
        timeout=DEADLINE_SECONDS, env={"DYN_LOG": "error"},
    )  # fmt: skip
    hit, mean = json.loads(done.stdout.splitlines()[-1])
    return hit, mean / 1000


def _calibration(
    cell: Cell, found: dict[str, list[Summary]], replayed: dict[str, tuple[float, ...]]
) -> tuple[float, list[harness.Goal]]:
    """The greatest relative error of mean TTFT (0 when nothing was replayed), and the goals."""
    worst, goals = 0.0, []
    for name, (hit, mean) in replayed.items():
        points = abs(statistics.fmean(item.hit for item in found[name]) - hit) * 100
        share = abs(statistics.fmean(item.mean for item in found[name]) / mean - 1)
        worst = max(worst, share)
        of = f"{cell.name}: {name}"
        goals.append(harness.Goal(f"{of}, hit rate against its replay", points, 3.0, unit=" points"))
        goals.append(harness.Goal(f"{of}, mean TTFT against its replay", share * 100, 10.0, unit=" %"))
    return worst, goals


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE",
                        help="Mooncake's format, .gz or plain; may be given again")  # fmt: skip
    parser.add_argument("--dynamo", type=Path, metavar="PYTHON", help="Python that has ai-dynamo 1.6.1")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name holds it: 'x4 600'")
    parser.add_argument("--seeds", type=int, help="runs of each cell (default: 5, 2 of made-up requests)")
    parser.add_argument("--host-blocks", type=int, default=0, metavar="N", help="memory tier (default: none)")
    parser.add_argument(
        "--pieces", type=Path, metavar="FOLDER", help="keep every run there, and go on from it"
    )


if __name__ == "__main__":
    sys.exit(harness.main("routing", run, _arguments))
