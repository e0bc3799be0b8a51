"""What stops a demo: one message, no traceback."""

from kvist_connector.errors import KvistError


class DemoError(KvistError):
    """The demo cannot go on; the text says at which step, why, and what to look at."""
