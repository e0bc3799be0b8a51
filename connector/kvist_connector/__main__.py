"""`python -m kvist_connector`: the cache agent; `python -m kvist_connector drain`: drain its replica."""

import sys

from kvist_connector import imports


def main() -> None:
    """Entry point of the `kvist-agent` command."""
    with imports.of_program("connector"):
        from kvist_connector.agent import app, drain_command

    arguments = sys.argv[1:]
    if arguments[:1] == ["drain"]:
        sys.exit(drain_command.run(arguments[1:]))
    sys.exit(app.run(arguments))


if __name__ == "__main__":
    main()
