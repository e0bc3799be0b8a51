"""The bearer token of the HTTP API, from a file that may change: its Secret is rotated while we run."""

from __future__ import annotations

import logging
from pathlib import Path

from kvist_connector.errors import ConfigError

log = logging.getLogger(__name__)


class TokenFile:
    """Called for the present token. A file that cannot be read any more leaves the last token in force."""

    def __init__(self, path: Path, setting: str = "http.token_file") -> None:
        self._path = path
        self._setting = setting
        self._stamp = (0, 0, 0)
        self._problem = ""
        self._token = self._read()

    def __call__(self) -> str:
        """The token; asks the file's status each time, and reads it again when that has changed."""
        try:
            token = self._read()
        except ConfigError as error:
            if str(error) != self._problem:  # once per cause
                log.error("%s; the last token stays in force", error)
            self._problem = str(error)
        else:
            self._token, self._problem = token, ""
        return self._token

    def _read(self) -> str:
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return self._token
            token = self._path.read_text().strip()
        except OSError as error:
            raise ConfigError(f"{self._setting}: {self._path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self._setting}: {self._path} is not text: put the bearer token into it"
            ) from error
        if not token:
            raise ConfigError(f"{self._setting}: {self._path} is empty: put the bearer token into it")
        self._stamp = stamp
        return token
