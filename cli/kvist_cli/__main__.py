"""`kvist` and `python -m kvist_cli`."""

from kvist_connector import imports


def main() -> None:
    """Entry point of the `kvist` script."""
    with imports.of_program("cli"):
        from kvist_cli.app import app

    app(prog_name="kvist")


if __name__ == "__main__":
    main()
