"""The paths that reach an engine: an allow-list. Called by endpoint.py and relay/app.py.

What an engine serves beside them is not for clients: loading adapters, clearing caches, pausing, calling
into its workers, and its own metrics and documentation.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvist_router.mind.interface import Path

STORED = "/v1/responses/{id}[/cancel]"  # as errors name it
_STORED = re.compile(r"/v1/responses/(resp_[A-Za-z0-9_-]{1,123})(/cancel)?")


class Route(NamedTuple):
    """What a path asks for; `response` is the id of a stored one."""

    path: Path
    method: str = "POST"
    response: str = ""


PATHS = {
    "/v1/chat/completions": Route("chat"),
    "/v1/completions": Route("completions"),
    "/v1/responses": Route("responses"),
    "/v1/embeddings": Route("embeddings"),
    "/tokenize": Route("tokens"),
    "/detokenize": Route("tokens"),
}


def route(path: str) -> Route | None:
    """None for a path that no engine gets."""
    known = PATHS.get(path)
    if known is not None:
        return known
    found = _STORED.fullmatch(path)
    if found is None:
        return None
    return Route("stored", "POST" if found.group(2) else "GET", found.group(1))
