"""`kvist demo`: flags, signals, exit status; the composition root of the demo.

Registered by kvist_cli/app.py, whose boundary turns errors into one message each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Annotated, Any

import typer

from kvist_cli import models
from kvist_cli.demo import manifests, report, trace
from kvist_cli.demo.ending import Running
from kvist_cli.demo.errors import DemoError
from kvist_cli.demo.play import Demo, Up
from kvist_cli.demo.screen import Screen
from kvist_cli.demo.workspace import workspace
from kvist_cli.local import Cluster, Options, Ports
from kvist_cli.local.machine import read_model_facts
from kvist_connector.errors import ConfigError
from kvist_operator.spec import CacheCluster

EXIT_INEXACT = 1
QUICK_SESSIONS = 2
PORT_STEP, PORT_TRIES = 10, 50


EXAMPLES = """
Examples:

  kvist demo

  kvist demo --json figures.json

  kvist demo --keep
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", epilog=EXAMPLES)(command)


def command(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there as JSON.")
    ] = None,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Leave the last cluster running until Ctrl-C, for requests of your own."),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two sessions instead of six: to try it, not for figures.")
    ] = False,
    model: Annotated[
        str,
        typer.Option("--model", help="A local folder or a Hugging Face name instead of the demo's model."),
    ] = models.DEMO_MODEL,
) -> None:
    """Replay a conversation on two real engines: plain vLLM, Kvist's routing alone, Kvist whole.

    Then kills an engine, stops and starts everything, and checks that cached answers are exact.
    Nothing is left behind; Ctrl-C stops every program.
    """
    with (
        Screen(_trace(quick)) as screen,
        _terminated_like_interrupted(),
        workspace(os.environ, screen.event, screen.kept) as folder,
    ):
        exact = _play(screen, quick, model, folder, json_file, keep)
    if not exact:
        raise typer.Exit(EXIT_INEXACT)


def _trace(quick: bool) -> trace.Trace:
    whole = trace.load()
    return trace.shortened(whole, QUICK_SESSIONS) if quick else whole


def _play(screen: Screen, quick: bool, model: str, folder: Path, json_file: Path | None, keep: bool) -> bool:
    if json_file is not None:
        _check_writable(json_file)
    screen.note("three replays of six conversations on two engines; engines take a minute or two to start")
    token_bytes = _token_bytes(model, screen)
    demo = Demo(_trace(quick), trace.load().text, model, screen, _starter(screen), folder, token_bytes)
    measured = demo.run(_keeper(screen) if keep else None)
    document = report.document(measured)
    screen.show_turns()
    screen.show_summary(document)
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1) + "\n")
        screen.note(f"figures written to {json_file}")
    screen.note(closing_line(document))
    return measured.exact


def _check_writable(file: Path) -> None:
    """Found out now, not after ten minutes."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--json {file}: the folder does not exist; create it or name another file")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"--json {file}: cannot be written; name another file")


def closing_line(document: dict[str, Any]) -> str:
    """The result in one sentence."""
    verdict = "exact" if document["exact"] else "NOT exact: " + "; ".join(document["exact_problems"])
    after = document["restart"]
    return (
        f"answers from cache: {verdict} ({document['exact_prompts']} prompts); after kill -9 "
        f"{after['arena_hit_tokens']:,} tokens from the arena, "
        f"after down and up {after['disk_hit_tokens']:,} from disk"
    )


def _token_bytes(model: str, screen: Screen) -> int:
    folder = models.resolve(model, None, os.environ, screen.note)
    size = read_model_facts(folder, "bfloat16").kv_bytes_per_token
    if size is None:
        raise DemoError(f"--model {model}: its config does not say how large its KV is; use another model")
    return size


def _starter(screen: Screen) -> Up:
    def up(manifest: CacheCluster, folder: Path) -> Running:
        return Cluster.up(manifest, Options(run_dir=folder, ports=free_ports()), screen.event)

    return up


def _keeper(screen: Screen) -> Callable[[Running], None]:
    def kept(cluster: Running) -> None:
        body = json.dumps(
            {"model": manifests.SERVED_NAME, "messages": [{"role": "user", "content": "Hello"}]}
        )
        url = f"{cluster.urls.router}/v1/chat/completions"
        screen.note(f"the cluster is at {cluster.urls.router}; Ctrl-C stops it. Try:")
        screen.note(f"  curl -i {url} -H 'Content-Type: application/json' -d '{body}'")
        with suppress(KeyboardInterrupt):
            Event().wait()

    return kept


def free_ports() -> Ports:
    """The usual ports, or the same ones shifted until all are free."""
    usual = Ports()
    for shift in range(0, PORT_STEP * PORT_TRIES, PORT_STEP):
        ports = Ports(**{name: first + shift for name, first in usual.model_dump().items()})
        if all(_free(first + i) for first in ports.model_dump().values() for i in range(manifests.REPLICAS)):
            return ports
    raise DemoError(f"no free ports found from {usual.router} on; end what uses them")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
