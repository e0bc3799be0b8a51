"""llm-d's 73 % workload on the simulated cluster: 8 replicas, 150 long prompts shared by 5 users each.

    python -m bench.capacity73 [--quick] [--seeds 3]

6,000 shared and 1,200 own tokens in, 1,000 out, Poisson arrivals of 3 to 60 a second; 307,328 KV tokens
an engine, so that the shared prompts take 73 % of what the cluster has. The engine model is the one of
bench/routing.py, not their H100s: ratios are to be compared, not seconds. At one rate also with feeds that
lag, and with several routers, which tell each other what they send or know only their own requests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

from bench import harness
from bench.routing import ROUTERS, MakeRouter
from bench.simulation import rivals
from bench.simulation.cluster import Summary, engines, simulate
from bench.simulation.engine import Engine, EngineSpec
from bench.simulation.generated import shared_prompts
from bench.simulation.ours import Lags, Routers
from bench.simulation.trace import BLOCK_TOKENS
from kvist_router.mind.policies import policy

COLUMNS: Final = ("hit", "mean TTFT s", "p99 TTFT s", "imbalance", "output tokens/s")
RATES: Final = (3.0, 10.0, 20.0, 40.0, 60.0)
SPEC: Final = EngineSpec(307_328 // BLOCK_TOKENS)
SECONDS: Final = 120.0
SWEPT_RATE: Final = 20.0
LAGS: Final = (0.0, 0.05, 0.2, 1.0, 5.0)  # seconds
ROUTER_COUNTS: Final = (1, 2, 4, 8)
ROUTER_LAG: Final = 0.05  # of feeds, with several routers
TOLD_LAG: Final = 0.005  # of what routers tell each other
GOAL: Final = 1.25  # of the best other's mean TTFT, at rates that are not beyond what the cluster can serve
SERVED: Final = 10.0
NOTES: Final = (
    "Approximate and precise are nearly equal here; the published difference between them is not reproduced. "
    "From about 20 requests/s on more comes than any of them can serve, and TTFT grows with the run.",
)


def run(options: harness.Options) -> harness.Result:
    """llm-d's 73 % workload."""
    seeds, seconds = (1, 20.0) if options.quick else (options.extra.seeds, SECONDS)
    made: dict[str, MakeRouter] = {
        name: ROUTERS[name] for name in ("kvist", "llm-d precise", "llm-d approximate")
    }
    made["random"] = rivals.Uniform
    rows, goals, last = [], [], {}
    for rate in RATES[::2] if options.quick else RATES:
        for name, make in made.items():
            found = [_one(make, seed, rate, seconds) for seed in range(seeds)]
            last[name] = statistics.fmean(item.mean for item in found)
            rows.append((f"{rate:g}", name, *_cells(found)))
        if rate <= SERVED:
            best = min(value for name, value in last.items() if name != "kvist")
            goals.append(
                harness.Goal(f"{rate:g}/s: mean TTFT / the best other's", last["kvist"] / best, GOAL)
            )
    title = f"{seconds:g} s of arrivals, {seeds} seeds"
    tables = (
        harness.Table(title, ("requests/s", "router", *COLUMNS), tuple(rows)),
        _swept(f"kvist at {SWEPT_RATE:g} requests/s, {title}", seeds, seconds),
    )
    times = {name: last[name] / last["kvist"] for name in made if name != "kvist"}
    text = ", ".join(f"{name} {value:.2f}x" for name, value in times.items())
    headline = f"mean TTFT at the highest rate, against kvist: {text}"
    return harness.Result(headline, tables, times, tuple(goals), notes=NOTES)


def _swept(title: str, seeds: int, seconds: float) -> harness.Table:
    """One router with feeds that lag, then several, heard and unheard."""
    forms = [(1, Lags(lag)) for lag in LAGS]
    forms += [(count, Lags(ROUTER_LAG, told)) for told in (TOLD_LAG, None) for count in ROUTER_COUNTS[1:]]
    rows = []
    for count, lags in forms:
        make = partial(_routers, count=count, lags=lags)
        told = f"{lags.told:g}" if lags.told is not None else "never" if count > 1 else ""
        found = [_one(make, n, SWEPT_RATE, seconds) for n in range(seeds)]
        rows.append((str(count), f"{lags.feed:g}", told, *_cells(found)))
    return harness.Table(title, ("routers", "feed lag s", "told after s", *COLUMNS), tuple(rows))


def _routers(cluster: Sequence[Engine], seed: int, count: int, lags: Lags) -> Routers:
    return Routers(cluster, seed, partial(policy, "kvist"), count, lags)


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
