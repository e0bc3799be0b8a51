"""Replicas from a YAML file, read again when it changes. Called by app.py.

A file that is missing or cannot be understood leaves the last good list in force: a half-written file
must not take the replicas away. At the start it is waited for, since whoever starts engines may write
it later; /readyz and the log say so. Write a new file and rename it over the old one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kvist_connector.errors import ConfigError
from kvist_connector.setting_files import text_of
from kvist_connector.settings import validate
from kvist_connector.yaml_text import YamlTextError, parse_documents
from kvist_router.discovery.source import Listed
from kvist_router.settings import ReplicaSettings, check_names

POLL_SECONDS = 0.5
MAX_FILE_BYTES = 16 * 2**20
_Stamp = tuple[int, int, int]

_log = logging.getLogger(__name__)


class FileSource:
    """See source.Source. `fixed` are replicas of the settings, which come before the file's."""

    def __init__(
        self, path: Path, fixed: Sequence[ReplicaSettings] = (), poll_seconds: float = POLL_SECONDS
    ) -> None:
        self._path = path
        self._fixed = tuple(fixed)
        self._poll_seconds = poll_seconds
        self.problem = ""

    async def watch(self) -> AsyncIterator[tuple[Listed, ...]]:
        """The fixed ones at once, then all, each time the file has changed and is valid."""
        if self._fixed:
            yield tuple(map(Listed, self._fixed))
        seen: _Stamp | None = None
        while True:
            stamp = await asyncio.to_thread(_stamp, self._path)
            if isinstance(stamp, str):
                self._say(stamp)
                seen = None
            elif stamp != seen:
                seen = stamp
                try:
                    replicas = await asyncio.to_thread(read_file, self._path, self._fixed)
                except ConfigError as error:
                    self._say(str(error))
                else:
                    self.problem = ""
                    yield tuple(map(Listed, (*self._fixed, *replicas)))
            await asyncio.sleep(self._poll_seconds)

    def _say(self, problem: str) -> None:
        if problem != self.problem:  # once per cause
            _log.error("%s; what was listed before stays in force", problem)
        self.problem = problem


def read_file(path: Path, fixed: tuple[ReplicaSettings, ...] = ()) -> tuple[ReplicaSettings, ...]:
    """The list in a file; raises ConfigError."""
    try:
        documents = parse_documents(text_of(path, MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"replicas_file {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"replicas_file {path}: is not text in UTF-8") from error
    except YamlTextError as error:
        raise ConfigError(f"replicas_file {path}: not YAML: {error}") from error
    if len(documents) > 1:
        raise ConfigError(f"replicas_file {path}: holds {len(documents)} documents, expected one list")
    loaded = documents[0] if documents else []
    if not isinstance(loaded, list):
        raise ConfigError(f"replicas_file {path}: must hold a list of {{name, url, agent}}")
    replicas = tuple(
        validate(ReplicaSettings, item, f"replicas_file {path}: {position}")
        for position, item in enumerate(loaded)
    )
    try:
        check_names((*fixed, *replicas))
    except ValueError as error:
        raise ConfigError(f"replicas_file {path}: {error}") from error
    return replicas


def _stamp(path: Path) -> _Stamp | str:
    """What changes with the file; why there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return f"replicas_file {path}: does not exist (yet); create it, or give another path"
    except OSError as error:
        return f"replicas_file {path}: cannot be read: {error.strerror}"
    return status.st_mtime_ns, status.st_size, status.st_ino
