"""`kvist model`: find, fetch or convert a model before a cluster needs it."""

from __future__ import annotations

import os
from typing import Annotated, Final

import typer
from rich.console import Console

from kvist_cli import models
from kvist_cli.commands.options import AsJson
from kvist_cli.output import print_json

_FETCH: Final = """
Examples:

  kvist model fetch-demo

  kvist model path HuggingFaceTB/SmolLM2-135M-Instruct
"""


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(no_args_is_help=True, help="Find, fetch or convert models.", epilog=_FETCH)
    group.command("path", epilog=_FETCH)(path)
    group.command("fetch-demo", epilog=_FETCH)(fetch_demo)
    app.add_typer(group, name="model")


def path(
    name: Annotated[str, typer.Argument(help="Folder, Hugging Face name or demo model.")],
    revision: Annotated[str | None, typer.Option(help="Commit or branch on the hub.")] = None,
    json: AsJson = False,
) -> None:
    """Print the folder of a model; fetches it when it is not there yet."""
    _show(str(models.resolve(name, revision, os.environ, _remark)), json)


def fetch_demo(json: AsJson = False) -> None:
    """Convert the demo's model from its Python package, once, and print its folder."""
    _show(str(models.demo_model(os.environ, _remark)), json)


def _show(folder: str, json: bool) -> None:
    if json:
        print_json({"path": folder})
    else:
        print(folder)


def _remark(text: str) -> None:
    # Beside the answer, which scripts read.
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="dim", markup=False)
