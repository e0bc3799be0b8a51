"""`kvist` and `python -m kvist_cli`."""

import os
import signal
from types import FrameType


def main() -> None:
    """Entry point of the `kvist` script."""
    # Imports take a second, in which an exception may be swallowed or shown as a fault of some library.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from kvist_cli.app import app

    signal.signal(signal.SIGINT, before)
    app(prog_name="kvist")


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
