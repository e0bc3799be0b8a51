"""From `model.name` to a folder with weights, config and tokenizer.

Called by `kvist up`, `kvist model`, the demo and the tests. Work that needs heavy libraries is done by
a child process each, so that the command itself starts fast and Ctrl-C ends it.
"""

from kvist_cli.models.demo import DEMO_MODEL, demo_model
from kvist_cli.models.resolve import resolve, resolve_adapter

__all__ = ["DEMO_MODEL", "demo_model", "resolve", "resolve_adapter"]
