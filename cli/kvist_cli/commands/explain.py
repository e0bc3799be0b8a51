"""`kvist explain`: where the router would send a request, and what it would cost on each replica."""

from __future__ import annotations

import json as jsonlib
import os
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer
from rich.table import Table

from kvist_cli import target
from kvist_cli.asking import Credentials, ask
from kvist_cli.commands.credentials import identified
from kvist_cli.commands.options import AsJson, ClusterName, RouterAdmin, RunDir
from kvist_cli.output import console, print_json
from kvist_connector.errors import ConfigError
from kvist_connector.names import PATH_EXPLAIN

_DEADLINE: Final = 35.0
_PARTS: Final = ("queue", "space", "load", "pending", "recompute", "total", "delays", "work")
_TITLES: Final = (*_PARTS[:5], "TTFT", *_PARTS[6:], "cost")
_HELP: Final = """
Examples:

  kvist explain request.json

  kvist explain request.json --router http://127.0.0.1:8081 --json

The file holds a chat or completion request as a client would send it; - for standard input. Nothing is sent
to an engine. Times are seconds; TTFT is the sum of the parts before it, delays are what all other requests
would lose together, work is what computing costs whoever comes next. The least cost is taken.
"""

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="JSON file with the request; - for standard input.")
]
Tenant = Annotated[str, typer.Option(help="Tenant whose request it is, where tenants are kept apart.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain", epilog=_HELP)(identified(explain))


def explain(
    file: File,
    credentials: Credentials,
    name: ClusterName = None,
    tenant: Tenant = "",
    run_dir: RunDir = None,
    router: RouterAdmin = None,
    json: AsJson = False,
) -> None:
    """Say which replica the router would take for a request, and why."""
    request = _read(file)
    query = urlencode({"path": "chat" if "messages" in request else "completions", "tenant": tenant})
    admin = router or target.read(target.find(name, run_dir, os.environ)).admin_url
    if not admin:
        raise ConfigError("explain: the cluster has no router; give --router URL")
    url = f"{admin.rstrip('/')}{PATH_EXPLAIN}?{query}"
    record = ask("POST", url, request, _DEADLINE, credentials)
    if json:
        print_json(record)
        return
    console().print(_table(record))
    share = f"{record['predicted_tokens']} of {record['prompt_tokens']} tokens reused"
    console().print(f"{record['replica']}: {record['reason']}; {share}", markup=False)


def _table(record: dict[str, Any]) -> Table:
    table = Table("replica", "reused", *_TITLES, box=None)
    for item in record["considered"]:
        cost = item["total"] + item["delays"] + item["work"]
        parts = (f"{seconds:.3f}" for seconds in (*(item[part] for part in _PARTS), cost))
        table.add_row(item["replica"], str(item["reused_tokens"]), *parts)
    return table


def _read(file: Path) -> dict[str, Any]:
    try:
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text()
        found = jsonlib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: must hold a request in JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: must hold one JSON object, a chat or completion request")
    return found
