"""Where the command keeps things, after the XDG base directory rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvist_connector.errors import ConfigError


def state_folder(environment: Mapping[str, str]) -> Path:
    """Run folders of clusters: $XDG_STATE_HOME/kvist, by default ~/.local/state/kvist."""
    return _base(environment, "XDG_STATE_HOME", ".local/state") / "kvist"


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Converted models: $XDG_CACHE_HOME/kvist, by default ~/.cache/kvist."""
    return _base(environment, "XDG_CACHE_HOME", ".cache") / "kvist"


def hub_folder(environment: Mapping[str, str]) -> Path:
    """Where the library of the Hugging Face hub keeps what it fetched."""
    home = environment.get("HF_HOME") or _base(environment, "XDG_CACHE_HOME", ".cache") / "huggingface"
    return Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")


def expanded(path: Path, field: str) -> Path:
    """With ~ and ~user replaced; raises ConfigError naming `field` when there is no such user."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{field}: '{path}' begins with the home of an unknown user: give a full path"
        ) from error


def check_usable(path: Path, field: str) -> None:
    """Raise ConfigError unless the folder is there, or can be made, and may be written to."""
    try:
        nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: '{path}' cannot be used: {error}; give another folder") from error
    if not nearest.is_dir():
        raise ConfigError(f"{field}: '{path}' cannot be used: '{nearest}' is no folder; give another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{field}: '{path}' cannot be used: '{nearest}' is read-only; give another folder")


def _base(environment: Mapping[str, str], variable: str, default: str) -> Path:
    given = environment.get(variable, "")
    # The rules say that a relative path there is to be ignored.
    return Path(given) if given.startswith("/") else Path.home() / default
