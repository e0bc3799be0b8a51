"""Composition root of the `kvist` command: its groups, in the order of --help."""

from __future__ import annotations

from typing import Annotated

import typer

from kvist_cli import demo
from kvist_cli.boundary import KvistGroup
from kvist_cli.commands import bench, cache, controls, down, explain, model, router, size, status, up
from kvist_cli.demo import register as register_demo
from kvist_cli.output import print_version

app = typer.Typer(
    cls=KvistGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "KVIST"},
    help="Many vLLM replicas that share and reuse KV caches, on one machine or on Kubernetes.",
    epilog="Every option can also be given as an environment variable, such as KVIST_UP_PORT_ROUTER=9000.",
)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options before the command."""


register_demo(app)
up.register(app)
down.register(app)
status.register(app)
router.register(app)
cache.register(app)
explain.register(app)
controls.register(app)
model.register(app)
size.register(app)
bench.register(app)
demo.register(app)
