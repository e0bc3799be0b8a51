"""Who may ask the HTTP API for what: two scopes, a bearer token each, and a line in the log for each change.

Compared in constant time, both tokens every time, so that the time to refuse tells nothing.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from kvist_connector.protocol.audit import short, shown

audit_log = logging.getLogger("kvist.audit")


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
        "asked": shown(asked),
        "answer": shown(told) if isinstance(told, dict) else short(told),
    }
    audit_log.info("%s", msgspec.json.encode(line).decode())
