"""What the audit log tells of a body: enough to know what was asked, and a line however long it was.

Pure; called by agents and routers for their lines of the logger `kvist.audit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

# Longer parts of a body are told by their length: a prompt does not belong into a log.
_LONGEST: Final = 128
_MOST_FIELDS: Final = 32


def shown(of: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body, long ones by their length."""
    told = {_cut(name): short(value) for name, value in islice(of.items(), _MOST_FIELDS)}
    return told | ({"...": f"{len(of)} fields"} if len(of) > _MOST_FIELDS else {})


def short(value: object) -> object:
    """One value."""
    if isinstance(value, list):
        return f"{len(value)} items"
    if isinstance(value, dict):
        return f"{len(value)} fields"
    return _cut(value) if isinstance(value, str) else value


def _cut(text: str) -> str:
    return f"{text[:_LONGEST]}..." if len(text) > _LONGEST else text
