"""`python -m kvist_operator`: see app.py."""

from __future__ import annotations

import sys

from kvist_connector import imports


def main() -> int:
    """Entry point."""
    with imports.of_program("operator"):
        from kvist_operator.app import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
