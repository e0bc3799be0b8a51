"""Where errors become one message and an exit code: 2 for bad input, 1 for what failed, 130 for Ctrl-C."""

from __future__ import annotations

from typing import Any, Final

import typer
from typer.core import TyperGroup

from kvist_cli.output import print_error
from kvist_connector.errors import ConfigError, KvistError

EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 130


class KvistGroup(TyperGroup):
    """Turns errors raised on purpose into messages; anything else is a fault of ours and shown whole."""

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
