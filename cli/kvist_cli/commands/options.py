"""Options that several commands share; help and defaults are those of the settings behind them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvist_cli.local.options import Options, Ports
from kvist_cli.target import known_clusters
from kvist_connector.errors import ConfigError
from kvist_connector.quantity import parse_quantity

_PANEL: Final = "This machine"


def _machine(flag: str, cls: type[Options | Ports], name: str) -> Any:
    text = cls.model_fields[name].description or ""
    prefix = "Port: " if cls is Ports else ""
    return typer.Option(flag, help=f"{prefix}{text}.", rich_help_panel=_PANEL)


RunDir = Annotated[Path | None, _machine("--run-dir", Options, "run_dir")]
ArenaDir = Annotated[Path, _machine("--arena-dir", Options, "arena_dir")]
SecretsDir = Annotated[Path | None, _machine("--secrets-dir", Options, "secrets_dir")]
Host = Annotated[str, _machine("--host", Options, "host")]
PortRouter = Annotated[int, _machine("--port-router", Ports, "router")]
PortRouterAdmin = Annotated[int, _machine("--port-router-admin", Ports, "router_admin")]
PortEngine = Annotated[int, _machine("--port-engine", Ports, "engine")]
PortAgent = Annotated[int, _machine("--port-agent", Ports, "agent")]
PortPeer = Annotated[int, _machine("--port-peer", Ports, "peer")]
Restarts = Annotated[int, _machine("--restarts", Options, "restarts")]
Backoff = Annotated[float, _machine("--backoff", Options, "backoff")]
StopDeadline = Annotated[float, _machine("--stop-deadline", Options, "stop_deadline")]
FlushDeadline = Annotated[float, _machine("--flush-deadline", Options, "flush_deadline")]


def _clusters(incomplete: str) -> list[str]:
    """For the shell: clusters of this machine whose names begin so."""
    return [name for name in known_clusters(os.environ) if name.startswith(incomplete)]


ClusterName = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="metadata.name of the cluster; may be left out if only one runs.",
        autocompletion=_clusters,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
RouterAdmin = Annotated[
    str | None,
    typer.Option("--router", metavar="URL", help="Ask the router with this admin address, not a cluster's."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="KVIST_TOKEN_FILE",
        help="File with the agents' bearer token, as agents on Kubernetes ask for.",
    ),
]
Agents = Annotated[
    list[str],
    typer.Option("--agent", metavar="URL", help="Ask this agent instead of a cluster's; repeatable."),
]


def quantity(option: str, given: str) -> int:
    """Bytes of an option; raises ConfigError naming it."""
    try:
        return parse_quantity(given)
    except ValueError as error:
        raise ConfigError(f"{option}: '{given}' is not valid: {error}") from error
