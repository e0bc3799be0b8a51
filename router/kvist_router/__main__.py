"""`python -m kvist_router`: see app.py."""

from __future__ import annotations

import sys

from kvist_connector import imports


def main() -> int:
    """Entry point of the `kvist-router` script."""
    with imports.of_program("router"):
        from kvist_router.app import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
