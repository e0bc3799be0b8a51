"""`kvist size`: KV bytes per token, what each tier holds, and from which bandwidth on a tier pays."""

from __future__ import annotations

import json as json_text
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from kvist_cli.commands.options import AsJson, quantity
from kvist_cli.output import console, print_json
from kvist_connector.errors import ConfigError, UnsupportedError
from kvist_connector.kv_size import KvSize, kv_size
from kvist_connector.planner import PrefillModel, break_even_bandwidth
from kvist_connector.quantity import format_bytes
from kvist_operator.spec import CacheCluster, load

_EXAMPLES: Final = """
Examples:

  kvist size MODEL/config.json --memory 64Gi --disk 1Ti --prefill 12000

  kvist size cluster.yaml --json      (model.name must be a folder)

Prefill speed is what an engine computes of a prompt, in tokens per second, as in vLLM's log.
Break-even is the bandwidth at which loading takes as long as computing.
"""
_PROMPTS: Final = (1024, 8192, 32768)
_CONFIG: Final = "config.json"


@dataclass(frozen=True)
class Asked:
    """What is to be sized."""

    config: dict[str, Any]
    dtype: str
    tiers: dict[str, int]  # bytes by name


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("size", epilog=_EXAMPLES)(size)


def size(
    model: Annotated[Path, typer.Argument(help="config.json, model folder or CacheCluster manifest.")],
    memory: Annotated[str | None, typer.Option(help="Memory tier, such as 64Gi. Default: manifest.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk tier, such as 1Ti. Default: manifest.")] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Type of numbers in the KV cache, such as bfloat16 or fp8. Default: the model's."),
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Prompt tokens computed per second. Default: none, no break-even."),
    ] = None,
    latency: Annotated[float, typer.Option(min=0, help="Seconds until a tier's first byte.")] = 0.0,
    json: AsJson = False,
) -> None:
    """KV bytes per token of a model, tokens that each tier holds, break-even bandwidth."""
    asked = _asked(model)
    tiers = dict(asked.tiers)
    for name, text in (("memory", memory), ("disk", disk)):
        if text is not None:
            tiers[name] = quantity(f"--{name}", text)
    found = kv_size(asked.config, kv_dtype or asked.dtype)
    if found.bytes_per_token is None:
        raise UnsupportedError(
            f"{model}: KV per token is not computed: {found.reason}; give a type with --kv-dtype, or start "
            "the engine and read its own figure"
        )
    answer = document(found, found.bytes_per_token, tiers, prefill, latency)
    if json:
        print_json(answer)
        return
    _print(answer)


def document(
    found: KvSize, per_token: int, tiers: dict[str, int], prefill: float | None, latency: float
) -> dict[str, Any]:
    """All figures. Bandwidths are bytes per second; None: the latency alone takes longer than computing."""
    model = PrefillModel(1 / prefill) if prefill else None
    return {
        "kind": found.kind.value,
        "formula": found.formula,
        "bytes_per_token": per_token,
        "tiers": {name: {"bytes": held, "tokens": held // per_token} for name, held in tiers.items() if held},
        "prompts": [
            {
                "tokens": tokens,
                "bytes": tokens * per_token,
                "break_even_bandwidth": (
                    break_even_bandwidth(model, tokens, tokens * per_token, latency) if model else None
                ),
            }
            for tokens in _PROMPTS
        ],
        "prefill": prefill,
    }


def _print(answer: dict[str, Any]) -> None:
    screen = console()
    per_token = answer["bytes_per_token"]
    screen.print(f"{format_bytes(per_token)} ({per_token} bytes) a token: {answer['kind']}")
    screen.print(f"  {answer['formula']}", style="dim", markup=False)
    if answer["tiers"]:
        table = Table("tier", "size", "tokens", box=None)
        for name, tier in answer["tiers"].items():
            table.add_row(name, format_bytes(tier["bytes"]), f"{tier['tokens']:,}")
        screen.print(table)
    table = Table("prompt, tokens", "KV", "loading pays from", box=None)
    for row in answer["prompts"]:
        table.add_row(f"{row['tokens']:,}", format_bytes(row["bytes"]), _bandwidth(answer, row))
    screen.print(table)


def _bandwidth(answer: dict[str, Any], row: dict[str, Any]) -> str:
    if answer["prefill"] is None:
        return "give --prefill"
    found = row["break_even_bandwidth"]
    return "never at this latency" if found is None else f"{format_bytes(found)}/s"


def _asked(path: Path) -> Asked:
    if path.is_dir():
        return Asked(_config(path / _CONFIG), "auto", {})
    if path.suffix in (".yaml", ".yml"):
        return _of_cluster(load(path), path)
    return Asked(_config(path), "auto", {})


def _of_cluster(cluster: CacheCluster, path: Path) -> Asked:
    folder, cache = Path(cluster.spec.model.name), cluster.spec.cache
    if not folder.is_dir():
        raise ConfigError(
            f"{path}: spec.model.name: '{folder}' is no folder here: give the one that "
            f"`kvist model path {folder}` prints, or the model's config.json"
        )
    tiers = {"memory": cache.memory, "disk": cache.disk.size if cache.disk is not None else 0}
    return Asked(_config(folder / _CONFIG), cluster.spec.engine.dtype, tiers)


def _config(path: Path) -> dict[str, Any]:
    try:
        found: Any = json_text.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a mapping, as a model's config.json does")
    return found
