"""A setting that is a file and may change while we run: its Secret is rotated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kvist_connector.errors import ConfigError
from kvist_connector.setting_files import text_of

T = TypeVar("T")
log = logging.getLogger(__name__)


class LiveFile(Generic[T]):
    """Called for the present value, from any thread.

    `parse` makes the value of the file's text, or raises ConfigError without what must stay secret.
    Making one raises ConfigError when the file is wrong. A file that cannot be read any more, or no
    longer makes sense, leaves the last value in force.
    """

    def __init__(self, path: Path, setting: str, parse: Callable[[str], T]) -> None:
        self._path = path
        self._setting = setting
        self._parse = parse
        self._problem = ""
        self._stamp = self._look()
        self._value = self._read()

    def __call__(self) -> T:
        """The value; asks for the file's status each time, and reads it again when that has changed."""
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._value = self._read()
                self._stamp = stamp
        except ConfigError as error:
            if str(error) != self._problem:  # once per cause
                log.error("%s; what was read before stays in force", error)
            self._problem = str(error)
        else:
            self._problem = ""
        return self._value

    def _look(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from error
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> T:
        try:
            text = text_of(self._path)
        except OSError as error:
            raise self._unreadable(error) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._setting}: {self._path} is not text") from error
        return self._parse(text)

    def _unreadable(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._setting}: {self._path} cannot be read: {error.strerror}")
