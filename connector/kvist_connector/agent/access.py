"""Who may ask the HTTP API for what: two scopes, a bearer token each, and a line in the log for each change.

Compared in constant time, both tokens every time, so that the time to refuse tells nothing.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

audit_log = logging.getLogger("kvist.audit")
# Longer parts of a body are told by their length: a prompt does not belong into a log.
_LONGEST: Final = 128


class Scope(StrEnum):
    """What a token allows."""

    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True)
class Access:
    """The tokens of this moment; without an admin token everybody who can connect is an admin."""

    admin: Callable[[], str] | None
    read: Callable[[], str] | None = None
    certificates: bool = False  # whether who asks needs one, too

    def scope(self, authorization: str) -> Scope | None:
        """What the Authorization header allows; None: nothing."""
        if self.admin is None:
            return Scope.ADMIN
        # Header bytes that are no UTF-8 come as lone surrogates; they are part of no token.
        given = authorization.encode(errors="surrogateescape")
        is_admin = hmac.compare_digest(given, b"Bearer " + self.admin().encode())
        is_reader = self.read is not None and hmac.compare_digest(given, b"Bearer " + self.read().encode())
        return Scope.ADMIN if is_admin else Scope.READ if is_reader else None


def audit(action: str, remote: str, asked: Mapping[str, Any], answer: object) -> None:
    """One line: what was asked, by whom, and what it changed."""
    told = msgspec.to_builtins(answer)
    line = {
        "action": action.rpartition("/")[2],
        "remote": remote,
        "asked": {name: _short(value) for name, value in asked.items()},
        "answer": {name: _short(value) for name, value in told.items()} if isinstance(told, dict) else told,
    }
    audit_log.info("%s", msgspec.json.encode(line).decode())


def _short(value: object) -> object:
    if isinstance(value, list):
        return f"{len(value)} items"
    return f"{value[:_LONGEST]}..." if isinstance(value, str) and len(value) > _LONGEST else value
