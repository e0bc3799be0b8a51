"""Logs of one line a record. Torch-free; called by every program.

Messages quote what others sent: servers of tiers, engines, clients. A line end there would begin a line that
no program wrote, and other control characters would move the cursor of whoever reads the log.
"""

from __future__ import annotations

import logging
import sys

from kvist_connector import names


class LineFormatter(logging.Formatter):
    """The message in one line; a trace may follow it."""

    def __init__(self) -> None:
        super().__init__(names.LOG_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base's name
        """See the class."""
        return plain(super().formatMessage(record))


def log_to_stderr(level: int | str) -> None:
    """Once, at the start of a program."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level, handlers=[handler])


def plain(text: str) -> str:
    """The text with everything escaped that is no letter, sign or space."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
