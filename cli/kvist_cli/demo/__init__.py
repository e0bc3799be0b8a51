"""The demo: what Kvist does to six conversations, on real engines. `command` is `kvist demo`."""

from kvist_cli.demo.entry import command, register

__all__ = ["command", "register"]
