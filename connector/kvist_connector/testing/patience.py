"""Limits of agents in tests: a loaded machine is no slow tier; only tests of limits set short ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SECONDS: Final = 30.0
"""What a lookup's questions and a chunk may take at a tier; a whole lookup has twice that."""

_LIMITS: Final = {
    "disk": ("deadline",),
    "redis": ("lookup_deadline", "deadline"),
    "object_store": ("lookup_deadline", "deadline"),
    "peer": ("lookup_deadline", "deadline"),
}


def patient(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` as AgentSettings takes them, with long limits where they name none."""
    sections = {
        name: dict.fromkeys(limits, SECONDS) | dict(settings[name])
        for name, limits in _LIMITS.items()
        if name in settings
    }
    return {"lookup_deadline": 2 * SECONDS} | dict(settings) | sections


def patient_flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same for `settings` as flags: names with __ in place of dots."""
    used = {name.partition("__")[0] for name in settings}
    flags = {
        f"{name}__{limit}": SECONDS for name, limits in _LIMITS.items() if name in used for limit in limits
    }
    return {"lookup_deadline": 2 * SECONDS} | flags | dict(settings)
