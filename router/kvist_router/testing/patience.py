"""Limits of routers in tests: a loaded machine is no slow engine; only tests of limits set short ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

SECONDS: Final = 60.0

_LIMITS: Final = {
    "limits": ("head_seconds", "body_seconds", "decide_seconds", "connect_seconds"),
    "tokens": ("remote_seconds",),
    "health": ("timeout_seconds",),
}


def patient(values: Mapping[str, Any]) -> dict[str, Any]:
    """As RouterSettings takes them, with long limits where they name none; engines are asked often."""
    sections = {
        name: dict.fromkeys(limits, SECONDS) | dict(values.get(name, {})) for name, limits in _LIMITS.items()
    }
    sections["health"] = {"interval_seconds": 0.05} | sections["health"]
    return dict(values) | sections


def patient_flags(flags: Sequence[str]) -> list[str]:
    """The same limits as flags before these, which count where they name one."""
    named = [
        (f"--{name}.{limit.replace('_', '-')}", str(SECONDS))
        for name, limits in _LIMITS.items()
        for limit in limits
    ]
    return [*(part for flag in named if flag[0] not in flags for part in flag), *flags]
