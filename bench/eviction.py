"""Hit rates of the cost-aware rule beside LRU and the offline optimum, on public traces.

"Knew": the same rule in a second pass, with what it had learned in the first: an agent that was started
again, and the same traffic. What is left to the optimum beyond it is hardly to be told from the traits that
the rule looks at.

    python -m bench.eviction --trace FILE [--trace FILE ...] [--capacity GIB ...]

The traces are not part of this repository (Mooncake publishes them); without one, made-up workloads
are replayed, which says less. On public ones our LRU is compared with that of
another program (PyPI `kvcache-simulator`) over the second half of the trace, which is what it measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench import harness
from bench.eviction_traces import names, workload
from kvist_connector.eviction import CostAware, Lru, Trace, optimum, read_trace, replay

GIBIBYTE = 2**30
CAPACITIES = (100, 200, 500)  # GiB, of the public traces
SHARES = (0.03, 0.1)  # of all distinct blocks, of made-up ones
BYTES_PER_TOKEN = 47616
GOAL_CLOSED = 1 / 3
GOAL_AGREEMENT = 0.1  # points


@dataclass(frozen=True)
class Cell:
    """One trace at one capacity; `apart`: points between our LRU and the other program's, if it can tell."""

    name: str
    capacity: int
    lru: float
    cost: float
    knew: float
    most: float
    apart: float | None

    @property
    def closed(self) -> float:
        """Share of the gap between LRU and the optimum."""
        return self._share(self.cost)

    def _share(self, rate: float) -> float:
        gap = self.most - self.lru
        return (rate - self.lru) / gap if gap > 0 else 1.0

    @property
    def row(self) -> tuple[str, ...]:
        """As printed."""
        rates = [f"{100 * rate:.2f} %" for rate in (self.lru, self.cost, self.knew, self.most)]
        apart = "-" if self.apart is None else f"{self.apart:.3f}"
        shares = (f"{100 * self.closed:.0f} %", f"{100 * self._share(self.knew):.0f} %")
        return (self.name, str(self.capacity), *rates, *shares, apart)


def run(options: harness.Options) -> harness.Result:
    """Replay each trace at each capacity through the agent's own eviction and the optimum."""
    files: list[Path] = options.extra.trace
    sizes = options.extra.capacity or CAPACITIES[: 1 if options.quick else None]
    cells = [cell for case in _cases(files, sizes, options.quick) for cell in _cells(*case, bool(files))]
    columns = ("trace", "blocks", "lru", "cost", "knew", "optimum", "gap closed", "knew", "LRUs apart")
    note = (
        "Share of prompt tokens hit, cold start included; the optimum is Belady's MIN over blocks. "
        "Knew: cost in a second pass, with what it had learned in the first. "
        "LRUs apart: points between ours and kvcache-simulator's."
    )
    least = 100 * min(cell.closed for cell in cells)
    return harness.Result(
        headline=f"the cost-aware rule closes {least:.0f} % of the gap from LRU to the optimum at least",
        tables=(harness.Table("Eviction", columns, tuple(cell.row for cell in cells), note),),
        figures={"closed": {f"{cell.name}, {cell.capacity} blocks": cell.closed for cell in cells}},
        goals=tuple(goal for cell in cells for goal in _goals(cell)) if files else (),
        absent=_absent(files),
    )


def _goals(cell: Cell) -> Iterator[harness.Goal]:
    name = f"{cell.name}, {cell.capacity} blocks"
    yield harness.Goal(f"{name}: share of the gap closed", cell.closed, GOAL_CLOSED, True)
    if cell.apart is not None:
        yield harness.Goal(
            f"{name}: our LRU and kvcache-simulator's", cell.apart, GOAL_AGREEMENT, False, " points"
        )


def _absent(files: list[Path]) -> tuple[str, ...]:
    if not files:
        return ("public traces: give --trace FILE; made-up workloads were replayed instead",)
    return () if find_spec("kvcache_sim") else ("kvcache-simulator: pip install kvcache-simulator",)


def _cases(files: list[Path], sizes: Sequence[int], quick: bool) -> Iterator[tuple[str, Trace, list[int]]]:
    for file in files:
        trace = read_trace(file)
        block = trace.block_tokens * BYTES_PER_TOKEN
        yield file.name, trace, [size * GIBIBYTE // block for size in sizes]
    for name in names() if not files else ():
        made = workload(name, seed=1, hours=0.1 if quick else 1.0)
        yield name, made, [int(share * made.distinct) for share in SHARES]


def _cells(name: str, trace: Trace, capacities: list[int], compare: bool) -> Iterator[Cell]:
    for capacity in capacities:
        lru, rule = replay(trace, capacity, Lru()).rate, CostAware()
        cost = replay(trace, capacity, rule).rate
        knew = replay(trace, capacity, CostAware(rule.learned())).rate
        apart = _apart(trace, capacity) if compare and find_spec("kvcache_sim") else None
        yield Cell(name, capacity, lru, cost, knew, optimum(trace, capacity).rate, apart)


def _apart(trace: Trace, capacity: int) -> float | None:
    """None when the other program finds the cache not full in time."""
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_lines

    plan = build_execution_plan(parse_trace_lines(_lines(trace), block_size=trace.block_tokens))
    theirs = simulate_policy(plan, "lru", capacity)
    if theirs.measurementMode != "fixed_window":
        return None
    return 100 * abs(replay(trace, capacity, Lru(), plan.warmup_requests).rate - float(theirs.hitRate))


def _lines(trace: Trace) -> Iterator[str]:
    for number in range(len(trace)):
        ids = trace.request(number).tolist()
        yield json.dumps({"input_length": trace.tokens(number, len(ids)), "hash_ids": ids})


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], metavar="FILE", help="Mooncake format; repeatable"
    )
    parser.add_argument(
        "--capacity",
        type=int,
        action="append",
        default=[],
        metavar="GIB",
        help="of the tier; default 100 200 500",
    )


if __name__ == "__main__":
    sys.exit(harness.main("eviction", run, _arguments))
