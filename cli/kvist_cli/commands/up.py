"""`kvist up`: a manifest's cluster as processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from shlex import quote
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from kvist_cli.commands.detach import start_detached
from kvist_cli.commands.options import (
    ArenaDir,
    Backoff,
    FlushDeadline,
    Host,
    PortAgent,
    PortEngine,
    PortPeer,
    PortRouter,
    PortRouterAdmin,
    Restarts,
    RunDir,
    SecretsDir,
    StopDeadline,
)
from kvist_cli.local import Cluster, Options
from kvist_cli.local.cluster import check_not_up
from kvist_cli.local.prepare import prepare, run_folder
from kvist_cli.local.state import RunFolder
from kvist_cli.output import console
from kvist_cli.progress import Progress
from kvist_connector import names
from kvist_connector.settings import validate
from kvist_operator import spec
from kvist_operator.plan.access import has_keys
from kvist_operator.spec import CacheCluster

EXAMPLES: Final = """
Examples:

  kvist up -f examples/minimal-cpu.yaml

  kvist up -f cluster.yaml --detach --port-router 9000

  kvist up -f cluster.yaml --check

A manifest is checked first and nothing starts when it is wrong. Ctrl-C ends every program in order, lets the
agents write to disk what is on its way and removes the memory tier; a second Ctrl-C kills at once.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("up", epilog=EXAMPLES)(up)


def up(
    file: Annotated[Path, typer.Option("--file", "-f", help="Manifest of kind CacheCluster.")],
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when all is ready; run on.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check manifest and machine, start nothing.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the manifest with all defaults and exit.")
    ] = False,
    run_dir: RunDir = None,
    arena_dir: ArenaDir = Path("/dev/shm"),
    secrets_dir: SecretsDir = None,
    host: Host = "127.0.0.1",
    port_router: PortRouter = names.PORT_ROUTER,
    port_router_admin: PortRouterAdmin = names.PORT_ROUTER_ADMIN,
    port_engine: PortEngine = names.PORT_ENGINE,
    port_agent: PortAgent = names.PORT_AGENT,
    port_peer: PortPeer = names.PORT_PEER,
    restarts: Restarts = 5,
    backoff: Backoff = 1.0,
    stop_deadline: StopDeadline = 30.0,
    flush_deadline: FlushDeadline = 60.0,
) -> None:
    """Start a cluster on this machine: agents, engines, router."""
    ports = {
        "router": port_router,
        "router_admin": port_router_admin,
        "engine": port_engine,
        "agent": port_agent,
        "peer": port_peer,
    }
    values = {
        "run_dir": run_dir,
        "arena_dir": arena_dir,
        "secrets_dir": secrets_dir,
        "host": host,
        "ports": ports,
        "restarts": restarts,
        "backoff": backoff,
        "stop_deadline": stop_deadline,
        "flush_deadline": flush_deadline,
    }
    options = validate(Options, values)
    manifest = spec.load(file)
    if print_config:
        print(spec.dump(manifest, defaults=True), end="")
    elif check:
        _check(manifest, options)
    elif detach:
        start_detached(file, manifest, options, console())
    else:
        _foreground(manifest, options)


def _check(manifest: CacheCluster, options: Options) -> None:
    out = console()
    check_not_up(RunFolder(run_folder(manifest.name, options, os.environ)), manifest.name)
    prepared = prepare(manifest, options, os.environ, Progress(out).on_event)
    out.print(f"ok: {manifest.name} would run {', '.join(p.name for p in prepared.processes)}")


def _foreground(manifest: CacheCluster, options: Options) -> None:
    out = console()
    # A supervisor that is told to end behaves as at Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which is how nohup asks to live on
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    progress = Progress(out)
    started = time.monotonic()
    with progress:
        cluster = Cluster.up(manifest, options, progress.on_event)
    try:
        _ready(out, cluster, manifest, time.monotonic() - started)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        out.print("stopping; Ctrl-C again kills at once")
        with progress:
            _down(cluster)
        out.print("stopped")
    finally:
        cluster.down(flush=False)


def _down(cluster: Cluster) -> None:
    try:
        cluster.down()
    except KeyboardInterrupt:
        cluster.abort()


def _ready(out: Console, cluster: Cluster, manifest: CacheCluster, seconds: float) -> None:
    out.print(
        f"ready in {seconds:.1f} s: {cluster.urls.router}/v1  (logs: {escape(str(cluster.run_dir / 'logs'))})"
    )
    line = curl_line(cluster.urls.router, manifest.served_name, has_keys(manifest))
    out.print(line, markup=False, soft_wrap=True)


def curl_line(url: str, model: str, keys: bool) -> str:
    """A first request to try."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    # The certificate is for the names that clients use, which this address is not.
    insecure = " --insecure" if url.startswith("https:") else ""
    key = ' -H "authorization: Bearer $KEY"' if keys else ""
    return (
        f"curl{insecure} {url}/v1/chat/completions -H 'content-type: application/json'{key} -d {quote(body)}"
    )
