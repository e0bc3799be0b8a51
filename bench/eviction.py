"""Hit rates of the cost-aware rule beside LRU and the offline optimum, on public traces.

    python -m bench.eviction --trace FILE [--trace FILE ...]

The traces are not part of this repository (Mooncake publishes them); without one the made-up workloads
on which the rule was tuned are replayed, which says less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import harness
from bench.eviction_traces import names, workload
from kvist_connector.eviction import CostAware, Hits, Lru, Trace, optimum, read_trace, replay

GIBIBYTE = 2**30
CAPACITIES = (100, 200, 500)  # GiB, of the public traces
SHARES = (0.03, 0.1)  # of all distinct blocks, of made-up ones
BYTES_PER_TOKEN = 47616
GOAL_CLOSED = 1 / 3


def run(options: harness.Options) -> harness.Result:
    """Replay each trace at each capacity through the agent's own eviction and the optimum."""
    files: list[Path] = options.extra.trace
    rows, closed = [], {}
    for name, trace, capacity in _cases(files, options.quick):
        rates = [hits.rate for hits in _rates(trace, capacity)]
        gap = rates[2] - rates[0]
        closed[f"{name}, {capacity} blocks"] = (rates[1] - rates[0]) / gap if gap > 0 else 1.0
        share = f"{100 * closed[f'{name}, {capacity} blocks']:.0f} %"
        rows.append((name, str(capacity), *(f"{100 * rate:.2f} %" for rate in rates), share))
    columns = ("trace", "blocks", "lru", "cost", "optimum", "gap closed")
    note = "Share of prompt tokens hit, cold start included; the optimum is Belady's MIN over blocks."
    return harness.Result(
        headline=f"the cost-aware rule closes {100 * min(closed.values()):.0f} % of the gap or more",
        tables=(harness.Table("Eviction", columns, tuple(rows), note),),
        figures={"closed": closed},
        goals=tuple(harness.Goal(name, share, GOAL_CLOSED, True) for name, share in closed.items())
        if files
        else (),
        absent=()
        if files
        else ("public traces: give --trace FILE; made-up workloads were replayed instead",),
    )


def _cases(files: list[Path], quick: bool) -> Iterator[tuple[str, Trace, int]]:
    for file in files:
        trace = read_trace(file)
        for size in CAPACITIES[: 1 if quick else None]:
            yield file.name, trace, size * GIBIBYTE // (trace.block_tokens * BYTES_PER_TOKEN)
    for name in names() if not files else ():
        made = workload(name, seed=1, hours=0.1 if quick else 1.0)
        for share in SHARES:
            yield name, made, int(share * made.distinct)


def _rates(trace: Trace, capacity: int) -> Iterator[Hits]:
    yield replay(trace, capacity, Lru())
    yield replay(trace, capacity, CostAware())
    yield optimum(trace, capacity)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], metavar="FILE", help="Mooncake format; repeatable"
    )


if __name__ == "__main__":
    sys.exit(harness.main("eviction", run, _arguments))
