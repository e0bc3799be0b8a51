"""A program's imports: Ctrl-C during them is one line, and so is a package that is not installed.

Called by each `__main__`, around its imports: these take a second or more, in which an exception may be
swallowed or shown as a fault of whatever is just being imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

EXIT_INTERRUPTED: Final = 130
EXIT_NOT_INSTALLED: Final = 2


@contextmanager
def of_program(extra: str) -> Iterator[None]:
    """`extra` has all that the imports inside need. SIGINT that is ignored or heard already stays so."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "kvist").startswith("kvist"):
            raise
        sys.stderr.write(
            f"error: the Python package {error.name} is not installed here: it comes with the extra {extra}, "
            f"as in `pip install '.[{extra}]'` (docs/install.md)\n"
        )
        raise SystemExit(EXIT_NOT_INSTALLED) from error
    finally:
        signal.signal(signal.SIGINT, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(EXIT_INTERRUPTED)
