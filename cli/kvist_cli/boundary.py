"""Where errors become one message and an exit code: 2 for bad input, 1 for what failed, 130 for Ctrl-C."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

import typer
from typer.core import TyperGroup

from kvist_cli.output import print_error
from kvist_connector.errors import ConfigError, KvistError
from kvist_connector.settings import nearest

EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 130


class KvistGroup(TyperGroup):
    """Turns errors raised on purpose into messages; anything else is a fault of ours and shown whole.

    Environment variables are as strict as flags: one that begins like a command's but names no option of
    it is refused. --version and the like are no settings, so KVIST_VERSION means nothing.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Options that only print something are not read from the environment."""
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if param.is_eager:
                param.allow_from_autoenv = False
        return params

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is meant; raises ConfigError for a variable that none of its options has."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not hasattr(command, "commands") and not command.ignore_unknown_options:
            prefix = f"{ctx.auto_envvar_prefix}_{name}_".upper().replace("-", "_")
            _refuse_unknown(prefix, {n for p in command.params for n in _variables(p, prefix)}, os.environ)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            print_error(str(error))
            raise typer.Exit(EXIT_BAD_INPUT) from error
        except KvistError as error:
            print_error(str(error))
            raise typer.Exit(EXIT_FAILED) from error
        except KeyboardInterrupt as error:
            print_error("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from error


def _variables(param: Any, prefix: str) -> list[str]:
    """Both names where a flag's own is none for Python, as --for."""
    own = [param.envvar] if isinstance(param.envvar, str) else []
    return [param.name.upper(), *(name.removeprefix(prefix) for name in own if name.startswith(prefix))]


def _refuse_unknown(prefix: str, known: set[str], variables: Iterable[str]) -> None:
    for variable in variables:
        name = variable.removeprefix(prefix)
        if variable.startswith(prefix) and name not in known:
            raise ConfigError(f"environment variable {variable}: no such option{nearest(name, known)}")
