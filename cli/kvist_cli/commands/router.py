"""`kvist router`: the router alone, in front of engines that somebody else runs."""

from __future__ import annotations

import os
import sys

import typer


def register(app: typer.Typer) -> None:
    """Add the command; every argument, --help too, is the router's own."""
    app.command(
        "router",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )(router)


def router(context: typer.Context) -> None:
    """Run the router in front of engines: kvist router --replica URL [--replica URL ...]."""
    os.execv(sys.executable, [sys.executable, "-m", "kvist_router", *context.args])
