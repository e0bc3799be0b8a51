"""How many tokens an answer had, without parsing it. Pure; called by relay/app.py."""

from __future__ import annotations

import re

_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')
_LOOKED_AT = 8192  # bytes at the end of a piece


def answer_tokens(tail: tuple[bytes, bytes], pieces: int) -> int:
    """As the usage in the last two pieces says; where there is none, a streamed piece counts as a token."""
    for piece in reversed(tail):
        if b'"completion_tokens"' in piece[-_LOOKED_AT:]:
            found = _USAGE.findall(piece, max(0, len(piece) - _LOOKED_AT))
            if found:
                return int(found[-1])
    return pieces
