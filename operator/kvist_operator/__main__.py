"""`python -m kvist_operator`: see app.py."""

from __future__ import annotations

import sys

from kvist_operator.app import run


def main() -> int:
    """Entry point."""
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
