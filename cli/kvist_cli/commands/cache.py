"""`kvist stats` and `kvist lookup`: what is cached where, of one cluster or by address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import typer

from kvist_cli import target
from kvist_cli.asking import AskError, Credentials, ask_all
from kvist_cli.commands.credentials import identified
from kvist_cli.commands.options import Agents, AsJson, ClusterName, RunDir
from kvist_cli.commands.selecting import Chosen, answers, refusal_of, selecting, show
from kvist_cli.output import console, print_json
from kvist_connector.names import PATH_LOOKUP, PATH_STATS
from kvist_connector.quantity import counted, format_bytes

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

  kvist lookup --messages request.json --router http://127.0.0.1:8081
"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("stats", epilog=_STATS)(identified(stats))
    app.command("lookup", epilog=_LOOKUP)(selecting(lookup))


def stats(
    credentials: Credentials,
    name: ClusterName = None,
    run_dir: RunDir = None,
    agent: Agents = [],  # noqa: B006
    json: AsJson = False,
) -> None:
    """Counts and bytes by tier, slots, leases and hits of every agent."""
    urls = target.agent_urls(name, run_dir, agent, os.environ)
    answers = _stats_of(urls, credentials)
    if json:
        print_json(answers)
        return
    for replica, answer in answers.items():
        rows = flatten(answer)
        width = max((len(key) for key, _ in rows), default=0)
        # Lines and no table: whatever the width of the terminal, no value is cut.
        lines = (f"  {key:{width}}  {_text(key, value)}" for key, value in rows)
        console().print("\n".join((replica, *lines)), markup=False, soft_wrap=True)


def lookup(chosen: Chosen) -> None:
    """How much of a prompt each replica holds, and in which tiers."""
    found = answers(chosen, PATH_LOOKUP, chosen.body("lookup"))
    show(chosen, found, _hit)


def _hit(answer: dict[str, Any]) -> str:
    tiers = sorted({tier for chunk in answer["chunks"] for tier in chunk["tiers"]})
    places = ", ".join(tiers) or "nowhere"
    hit = f"{answer['hit_chunks']} of {counted(len(answer['chunks']), 'chunk')}"
    return f"{hit}, {counted(answer['hit_tokens'], 'token')} ({places})"


def flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested mappings with dotted names."""
    found: list[tuple[str, Any]] = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            found.extend(flatten(item, f"{prefix}{key}."))
        else:
            found.append((prefix + key, item))
    return found


def _stats_of(urls: Mapping[str, str], credentials: Credentials) -> dict[str, Any]:
    asked = {replica: url + PATH_STATS for replica, url in urls.items()}
    answers = ask_all("GET", asked, who=credentials.for_agents())
    for answer in answers.values():
        refusal = refusal_of(answer)
        if refusal is not None:
            raise AskError(refusal)
    return answers


def _text(key: str, value: Any) -> str:
    is_bytes = isinstance(value, int) and "bytes" in key
    return f"{value} ({format_bytes(value)})" if is_bytes else str(value)
