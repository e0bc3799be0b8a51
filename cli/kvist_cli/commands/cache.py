"""`kvist stats`, `kvist lookup`, `kvist clear`: the agents' controls, of one cluster or by address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from kvist_cli import target
from kvist_cli.asking import DEADLINE, AskError, ask_all
from kvist_cli.commands.options import Agents, AsJson, ClusterName, RunDir, TokenFile
from kvist_cli.output import console, print_json
from kvist_connector.errors import ConfigError
from kvist_connector.names import PATH_CLEAR, PATH_LOOKUP, PATH_STATS
from kvist_connector.quantity import format_bytes

CLEAR_DEADLINE: Final = 120.0  # a shared tier is listed and emptied meanwhile
_STATS: Final = """
Examples:

  kvist stats

  kvist stats --agent http://127.0.0.1:8200 --json

  kvist stats --agent http://127.0.0.1:8200 --token-file TOKEN      (behind kubectl port-forward)
"""
_LOOKUP: Final = """
Examples:

  kvist lookup --tokens prompt.txt      (token ids, separated by blanks, commas or lines)

  kvist lookup --key 0123456789abcdef0123456789abcdef --json
"""
_CLEAR: Final = """
Examples:

  kvist clear --tier memory

  kvist clear demo --tier all

Chunks that a running request uses stay and are counted. Redis and object store are cleared for every
agent that shares them, and --tier all includes them.
"""


class TierName(StrEnum):
    """What can be cleared."""

    MEMORY = "memory"
    DISK = "disk"
    REDIS = "redis"
    OBJECT = "object"
    ALL = "all"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("stats", epilog=_STATS)(stats)
    app.command("lookup", epilog=_LOOKUP)(lookup)
    app.command("clear", epilog=_CLEAR)(clear)


def stats(
    name: ClusterName = None,
    run_dir: RunDir = None,
    agent: Agents = [],  # noqa: B006
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Counts and bytes by tier, slots, leases and hits of every agent."""
    answers = _ask(_Asked(name, run_dir, agent, token_file), "GET", PATH_STATS, None)
    if json:
        print_json(answers)
        return
    for replica, answer in answers.items():
        table = Table(title=replica, title_justify="left", box=None, show_header=False)
        for key, value in flatten(answer):
            table.add_row(key, _text(key, value))
        console().print(table)


def lookup(
    name: ClusterName = None,
    tokens: Annotated[Path | None, typer.Option(help="File with token ids; - for standard input.")] = None,
    key: Annotated[list[str], typer.Option(help="Chunk key in hex; repeatable.")] = [],  # noqa: B006
    salt: Annotated[str, typer.Option(help="Cache salt of the request.")] = "",
    lora: Annotated[str, typer.Option(help="LoRA adapter of the request.")] = "",
    run_dir: RunDir = None,
    agent: Agents = [],  # noqa: B006
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """How much of a prompt each replica holds, and in which tiers."""
    if (tokens is None) == (not key):
        raise ConfigError("lookup: give either --tokens FILE or --key HEX")
    body: dict[str, Any] = {"keys": key} if tokens is None else {"tokens": read_tokens(tokens)}
    body |= {field: value for field, value in (("salt", salt), ("lora", lora)) if value}
    answers = _ask(_Asked(name, run_dir, agent, token_file), "POST", PATH_LOOKUP, body)
    if json:
        print_json(answers)
        return
    for replica, answer in answers.items():
        tiers = sorted({tier for chunk in answer["chunks"] for tier in chunk["tiers"]})
        places = ", ".join(tiers) or "nowhere"
        console().print(f"{replica}: {answer['hit_chunks']} chunks, {answer['hit_tokens']} tokens ({places})")


def clear(
    name: ClusterName = None,
    tier: Annotated[TierName, typer.Option(help="What to empty.")] = TierName.ALL,
    run_dir: RunDir = None,
    agent: Agents = [],  # noqa: B006
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Remove cached chunks."""
    answers = _ask(
        _Asked(name, run_dir, agent, token_file), "POST", PATH_CLEAR, {"tier": tier.value}, CLEAR_DEADLINE
    )
    if json:
        print_json(answers)
        return
    for replica, answer in answers.items():
        leased = f", {answer['leased']} in use stay" if answer.get("leased") else ""
        console().print(
            f"{replica}: {answer['chunks']} chunks, {format_bytes(answer['bytes'])} removed{leased}"
        )


def read_tokens(path: Path) -> list[int]:
    """Token ids of a file; raises ConfigError for anything else."""
    try:
        text = typer.get_text_stream("stdin").read() if str(path) == "-" else path.read_text()
        return [int(part) for part in text.replace(",", " ").strip("[] \n").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokens {path}: must hold token ids: {error}") from error


def flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested mappings with dotted names."""
    found: list[tuple[str, Any]] = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            found.extend(flatten(item, f"{prefix}{key}."))
        else:
            found.append((prefix + key, item))
    return found


@dataclass(frozen=True)
class _Asked:
    """Which agents are meant, and their token."""

    name: str | None
    run_dir: Path | None
    agents: list[str]
    token_file: Path | None


def _ask(asked: _Asked, method: str, path: str, body: Any, deadline: float = DEADLINE) -> dict[str, Any]:
    urls = target.agent_urls(asked.name, asked.run_dir, asked.agents, os.environ)
    token = target.token(asked.token_file)
    answers = ask_all(method, {replica: url + path for replica, url in urls.items()}, body, deadline, token)
    for answer in answers.values():
        if set(answer) == {"error"}:
            raise AskError(answer["error"])
    return answers


def _text(key: str, value: Any) -> str:
    is_bytes = isinstance(value, int) and "bytes" in key
    return f"{value} ({format_bytes(value)})" if is_bytes else str(value)
