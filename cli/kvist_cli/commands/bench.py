"""`kvist bench eviction`: what a tier of a given size would have held, on a recorded trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from kvist_cli.commands.options import AsJson, quantity
from kvist_cli.output import console, print_json
from kvist_cli.progress import Counting
from kvist_connector.errors import ConfigError
from kvist_connector.eviction import Hits, Trace, optimum, policy, read_trace, replay
from kvist_connector.quantity import format_bytes

_EXAMPLES: Final = """
Examples:

  kvist bench eviction --trace conversation_trace.jsonl.gz --capacity 100Gi --capacity 500Gi

  kvist bench eviction --trace trace.jsonl --capacity 64Gi --bytes-per-token 49152 --policy lru --json

A trace is JSON lines, plain or gzip: input_length, hash_ids (the blocks of the prompt) and output_length
(tokens decoded; without it the cost-aware rule does not know how long answers are). The
optimum knows the future: no order of eviction hits more blocks. `kvist size` says the bytes per token.
"""


class PolicyName(StrEnum):
    """Rules that can be compared."""

    LRU = "lru"
    COST = "cost"
    OPTIMUM = "optimum"


@dataclass(frozen=True)
class Row:
    """One capacity and one rule."""

    policy: str
    capacity: int  # bytes
    blocks: int  # that fit
    hits: Hits


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(no_args_is_help=True, help="Measure without a cluster.", epilog=_EXAMPLES)
    group.command("eviction", epilog=_EXAMPLES)(eviction)
    group.callback()(_group)
    app.add_typer(group, name="bench")


def _group() -> None:
    """Measure without a cluster."""


def eviction(
    trace: Annotated[Path, typer.Option(help="File of the trace.")],
    capacity: Annotated[list[str], typer.Option(help="Size of the tier, such as 100Gi; repeatable.")],
    bytes_per_token: Annotated[
        int, typer.Option(min=1, help="KV bytes per token over all layers and ranks.")
    ] = 47616,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one block of the trace.")] = 512,
    rules: Annotated[
        list[PolicyName],
        typer.Option(
            "--policy", envvar="KVIST_BENCH_EVICTION_POLICY", help="Rule to replay; repeatable. Default: all."
        ),
    ] = [],  # noqa: B006
    json: AsJson = False,
) -> None:
    """Replay a trace through the agent's eviction: hit rate of each rule beside the offline optimum."""
    capacities = [_capacity(text, block_tokens * bytes_per_token) for text in capacity]
    chosen = rules or list(PolicyName)
    with Counting(Console(stderr=True)) as shown:
        requests = read_trace(trace, block_tokens, lambda number: shown.say(f"reading, request {number}"))
        rows = [
            Row(name.value, size, blocks, _run(requests, name, blocks, shown))
            for size, blocks in capacities
            for name in chosen
        ]
    if json:
        print_json(document(trace, requests, rows, bytes_per_token))
    else:
        console().print(_table(trace, requests, rows))


def _capacity(text: str, block: int) -> tuple[int, int]:
    size = quantity("--capacity", text)
    if size < block:
        raise ConfigError(f"--capacity: '{text}' holds no block of {format_bytes(block)}: give more")
    return size, size // block


def _run(trace: Trace, name: PolicyName, blocks: int, shown: Counting) -> Hits:
    shown.start(f"{name.value}, {blocks} blocks", len(trace))
    if name is PolicyName.OPTIMUM:
        return optimum(trace, blocks, progress=shown.reached)
    return replay(trace, blocks, policy("lru" if name is PolicyName.LRU else "cost"), progress=shown.reached)


def document(path: Path, trace: Trace, rows: list[Row], bytes_per_token: int) -> dict[str, Any]:
    """For scripts."""
    return {
        "trace": str(path),
        "requests": len(trace),
        "blocks": len(trace.blocks),
        "distinct_blocks": trace.distinct,
        "block_tokens": trace.block_tokens,
        "bytes_per_token": bytes_per_token,
        "rows": [{**asdict(row), "hit_rate": row.hits.rate} for row in rows],
    }


def _table(path: Path, trace: Trace, rows: list[Row]) -> Table:
    names = list(dict.fromkeys(row.policy for row in rows))
    title = f"{path.name}: {len(trace)} requests, {trace.distinct} distinct blocks; tokens hit"
    table = Table("capacity", "blocks", *names, "gap closed", title=title, title_justify="left", box=None)
    for size in dict.fromkeys(row.capacity for row in rows):
        rates = {row.policy: row.hits.rate for row in rows if row.capacity == size}
        blocks = next(row.blocks for row in rows if row.capacity == size)
        cells = [f"{100 * rates[name]:.2f} %" for name in names]
        table.add_row(format_bytes(size), str(blocks), *cells, _closed(rates))
    return table


def _closed(rates: dict[str, float]) -> str:
    if len(rates) < len(PolicyName):
        return "-"
    gap = rates[PolicyName.OPTIMUM] - rates[PolicyName.LRU]
    return f"{100 * (rates[PolicyName.COST] - rates[PolicyName.LRU]) / gap:.0f} %" if gap > 0 else "no gap"
