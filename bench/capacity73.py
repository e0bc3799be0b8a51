"""llm-d's 73 % workload on the simulated cluster: 8 replicas, 150 long prompts shared by 5 users each.

    python -m bench.capacity73 [--quick] [--seeds 3]

6,000 shared and 1,200 own tokens in, 1,000 out, Poisson arrivals of 3 to 60 a second; 307,328 KV tokens
an engine, so that the shared prompts take 73 % of what the cluster has. The engine model is the one of
bench/routing.py, not their H100s: ratios are to be compared, not seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Final

from bench import harness
from bench.routing import ROUTERS, MakeRouter
from bench.simulation import rivals
from bench.simulation.cluster import Summary, engines, simulate
from bench.simulation.engine import EngineSpec
from bench.simulation.generated import shared_prompts
from bench.simulation.trace import BLOCK_TOKENS

RATES: Final = (3.0, 10.0, 20.0, 40.0, 60.0)
SPEC: Final = EngineSpec(307_328 // BLOCK_TOKENS)
SECONDS: Final = 120.0


def run(options: harness.Options) -> harness.Result:
    """llm-d's 73 % workload."""
    seeds, seconds = (1, 20.0) if options.quick else (options.extra.seeds, SECONDS)
    made: dict[str, MakeRouter] = {
        name: ROUTERS[name] for name in ("kvist", "llm-d precise", "llm-d approximate")
    }
    made["random"] = rivals.Uniform
    rows, last = [], {}
    for rate in RATES[::2] if options.quick else RATES:
        for name, make in made.items():
            found = [_one(make, seed, rate, seconds) for seed in range(seeds)]
            last[name] = statistics.fmean(item.mean for item in found)
            rows.append((f"{rate:g}", name, *_cells(found)))
    table = harness.Table(
        f"{seconds:g} s of arrivals, {seeds} seeds",
        ("requests/s", "router", "hit", "mean TTFT s", "p99 TTFT s", "imbalance", "output tokens/s"),
        tuple(rows),
    )
    times = {name: last[name] / last["kvist"] for name in made if name != "kvist"}
    text = ", ".join(f"{name} {value:.2f}x" for name, value in times.items())
    return harness.Result(f"mean TTFT at the highest rate, against kvist: {text}", (table,), times)


def _one(make: MakeRouter, seed: int, rate: float, seconds: float) -> Summary:
    cluster = engines(SPEC)
    return simulate(shared_prompts(seed, rate, seconds), cluster, make(cluster, seed))


def _cells(found: list[Summary]) -> tuple[str, ...]:
    means = [statistics.fmean(getattr(item, what) for item in found)
             for what in ("hit", "mean", "p99", "imbalance")]  # fmt: skip
    output = statistics.fmean(item.completed * 1000 / item.seconds for item in found)
    return f"{means[0]:.3f}", f"{means[1]:.2f}", f"{means[2]:.2f}", f"{means[3]:.2f}", f"{output:.0f}"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="runs of each rate (default: 3)")


if __name__ == "__main__":
    sys.exit(harness.main("capacity73", run, _arguments))
