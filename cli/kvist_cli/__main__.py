"""`kvist` and `python -m kvist_cli`."""

from kvist_cli.app import app


def main() -> None:
    """Entry point of the `kvist` script."""
    app(prog_name="kvist")


if __name__ == "__main__":
    main()
