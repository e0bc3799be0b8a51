"""`make bench`: run every bench and write docs/benchmarks.md from their figures.

    python -m bench.report [--check] [--quick] [--only NAME] [--trace FILE] [--page] [--output FILE]

Each bench runs in a process of its own, one at a time, so that none disturbs another. A bench that ran
replaces its section of the page, the others' stay; `--check` passes on and makes a missed goal the exit
status. What is published of routing and eviction is measured on public traces, which are not in this
repository: without `--trace` these two run on made-up requests, for their goals, and their sections stay.
So does the section of agents without `--agent-trace`. What a run cannot say, such as why a goal is missed, is
written by hand into bench/remarks/NAME.md and stands at the end of the section.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BENCHES = (
    "ttft",
    "miss",
    "router",
    "gap",
    "overhead",
    "agents",
    "idle",
    "arena",
    "tiers",
    "operator",
    "routing",
    "capacity73",
    "eviction",
    "lookup",
    "mirror",
    "breakeven",
    "lossy",
)
ON_TRACES = ("routing", "eviction")
DEADLINE_SECONDS = 3600
REMARKS = Path(__file__).parent / "remarks"
REMARKS_TITLE = "### Remarks"
HEAD = (
    "# Benchmarks",
    "",
    "Written by `make bench`. Every ratio compares two things measured in the same run on one machine;",
    "`python -m bench.NAME --check` says whether the goals hold where you run it.",
    "",
    "`x [low, high] of N` is a median of N rounds and its 95 % interval (bootstrap over the rounds). A goal",
    "is met or missed by the median; where the interval reaches over the limit, another run may end",
    "otherwise, and the line says so. Missed goals stay on the page.",
)


def run_bench(name: str, folder: Path, flags: Sequence[str]) -> tuple[int, dict[str, Any] | None]:
    """Exit status and JSON document of one bench; its output goes to ours as it comes."""
    target = folder / f"{name}.json"
    command = [sys.executable, "-m", f"bench.{name}", "--json", str(target), *flags]
    print(f"--- {' '.join(command[1:])}", flush=True)
    status = subprocess.run(command, check=False, timeout=DEADLINE_SECONDS).returncode
    return status, json.loads(target.read_text()) if target.exists() else None


def read_remarks(folder: Path = REMARKS) -> dict[str, str]:
    """What is written by hand, by bench."""
    return {path.stem: path.read_text().strip() for path in sorted(folder.glob("*.md"))}


def page(documents: Sequence[dict[str, Any]], old: str = "", remarks: Mapping[str, str] | None = None) -> str:
    """docs/benchmarks.md: how each table was made stands beside it. Other sections of `old` stay."""
    remarks = read_remarks() if remarks is None else remarks
    kept = {name: text for name, _, text in (part.partition("\n") for part in old.split("\n## ")[1:])}
    sections = {name: ["", f"## {name}", *without_remarks(text).split("\n")] for name, text in kept.items()}
    sections |= {document["bench"]: section(document) for document in documents}
    for name in sections.keys() & remarks.keys():
        sections[name] += ["", REMARKS_TITLE, "", *remarks[name].split("\n")]
    order = [name for name in BENCHES if name in sections]
    order += [name for name in sections if name not in BENCHES]
    return "\n".join([*HEAD, *(line for name in order for line in sections[name])]) + "\n"


def without_remarks(text: str) -> str:
    """A section of the page as its run left it."""
    return text.partition(f"\n{REMARKS_TITLE}\n")[0].rstrip("\n")


def section(document: dict[str, Any]) -> list[str]:
    """One bench: command, machine, tables, goals."""
    machine = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    lines = ["", f"## {document['bench']}", "", f"`{document['command']}`", "", f"Machine: {machine}.", ""]
    lines += [f"Result: {document['headline']}"]
    for note in document["notes"]:
        lines += ["", note]
    for table in document["tables"]:
        lines += ["", *markdown_table(table)]
    lines += ["", *(f"- {goal['text']}" for goal in document["goals"])] if document["goals"] else []
    absent = [f"- not measured, since it is not here: {text}" for text in document["absent"]]
    return [*lines, "", *absent] if absent else lines


def markdown_table(table: dict[str, Any]) -> list[str]:
    """A table of the page with its note."""
    columns = table["columns"]
    rows = [columns, ["---"] * len(columns), *table["rows"]]
    lines = [f"**{table['title']}**", "", *("| " + " | ".join(row) + " |" for row in rows)]
    return [*lines, "", table["note"]] if table["note"] else lines


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every bench ran and, with --check, met its goals."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description="Run all benches, write the page."
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--quick", action="store_true", help="few rounds: the page is not written")
    parser.add_argument(
        "--page", action="store_true", help="run nothing: put the remarks as they are now into it"
    )
    parser.add_argument("--only", action="append", choices=BENCHES, help="run this bench alone; repeatable")
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE",
                        help=f"public trace for {' and '.join(ON_TRACES)}; may be given again")  # fmt: skip
    parser.add_argument("--lmcache", type=Path, metavar="PROGRAM", help="for arena and tiers")
    parser.add_argument("--agent-trace", type=Path, action="append", default=[], metavar="FILE",
                        help="trace of agents' sessions, for agents; may be given again")  # fmt: skip
    parser.add_argument("--vllm-router", type=Path, metavar="PROGRAM", help="for router and overhead")
    parser.add_argument("--dynamo", type=Path, metavar="PYTHON", help="Python with ai-dynamo, for routing")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks.md"), help="page to write")
    given = parser.parse_args(argv)
    flags = [f"--{name}" for name in ("check", "quick") if getattr(given, name)]
    traces = [word for path in given.trace for word in ("--trace", str(path))]
    more = dict.fromkeys(ON_TRACES, traces)
    more["agents"] = [word for path in given.agent_trace for word in ("--trace", str(path))]
    if given.vllm_router is not None:
        more["router"] = more["overhead"] = ["--vllm-router", str(given.vllm_router)]
    if given.lmcache is not None:
        more["arena"] = more["tiers"] = ["--lmcache", str(given.lmcache)]
    if given.dynamo is not None:
        more["routing"] = [*traces, "--dynamo", str(given.dynamo)]
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        outcomes = {
            name: run_bench(name, Path(folder), [*flags, *more.get(name, ())])
            for name in ([] if given.page else given.only or BENCHES)
        }
    documents = [
        document
        for name, (_, document) in outcomes.items()
        if document is not None
        and (given.trace or name not in ON_TRACES)
        and (given.agent_trace or name != "agents")
    ]
    if given.page or (documents and not given.quick):
        old = given.output.read_text() if given.output.exists() else ""
        given.output.write_text(page(documents, old))
        print(f"wrote {given.output}")
    failed = [name for name, (status, document) in outcomes.items() if status or document is None]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(outcomes)} benches ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
