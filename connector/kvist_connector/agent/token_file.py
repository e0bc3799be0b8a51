"""The bearer token of the HTTP API, from a file."""

from __future__ import annotations

from pathlib import Path

from kvist_connector.agent.live_file import LiveFile
from kvist_connector.errors import ConfigError


class TokenFile(LiveFile[str]):
    """Called for the present token."""

    def __init__(self, path: Path, setting: str = "http.token_file") -> None:
        def parse(text: str) -> str:
            if not text.strip():
                raise ConfigError(f"{setting}: {path} is empty: put the bearer token into it")
            return text.strip()

        super().__init__(path, setting, parse)
