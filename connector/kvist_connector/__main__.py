"""`python -m kvist_connector`: the cache agent."""

import sys

from kvist_connector.agent.app import run


def main() -> None:
    """Entry point of the `kvist-agent` command."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
