"""Where the command keeps things, after the XDG base directory rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def state_folder(environment: Mapping[str, str]) -> Path:
    """Run folders of clusters: $XDG_STATE_HOME/kvist, by default ~/.local/state/kvist."""
    return _base(environment, "XDG_STATE_HOME", ".local/state") / "kvist"


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Converted models: $XDG_CACHE_HOME/kvist, by default ~/.cache/kvist."""
    return _base(environment, "XDG_CACHE_HOME", ".cache") / "kvist"


def _base(environment: Mapping[str, str], variable: str, default: str) -> Path:
    given = environment.get(variable, "")
    # The rules say that a relative path there is to be ignored.
    return Path(given) if given.startswith("/") else Path.home() / default
