"""How the command speaks: tables and remarks for people, JSON on standard output for scripts."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import typer
from rich.console import Console

from kvist_connector.log_lines import plain


def console() -> Console:
    """Standard output; plain when it is no terminal."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def print_error(text: str) -> None:
    """One message on standard error; what it quotes of a server's moves no cursor."""
    Console(stderr=True, highlight=False, soft_wrap=True).print("error:", style="bold red", end=" ")
    print("\n".join(map(plain, text.split("\n"))), file=sys.stderr)


def print_json(value: Any) -> None:
    """A document for scripts."""
    print(json.dumps(value, indent=2, default=str))


def print_version(wanted: bool) -> None:
    """Callback of --version."""
    if wanted:
        print(f"kvist {version('kvist')}")
        raise typer.Exit
