"""Replicas from a YAML file, read again when it changes. Called by app.py.

A file that cannot be read or understood leaves the last good list in force: a half-written file
must not take the replicas away. Write a new file and rename it over the old one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kvist_connector.errors import ConfigError
from kvist_connector.settings import validate
from kvist_connector.yaml_text import YamlTextError, parse_documents
from kvist_router.settings import ReplicaSettings, check_names

POLL_SECONDS = 0.5

_log = logging.getLogger(__name__)


async def watch_file(
    path: Path, fixed: Sequence[ReplicaSettings] = (), poll_seconds: float = POLL_SECONDS
) -> AsyncIterator[tuple[ReplicaSettings, ...]]:
    """`fixed` and the file's list, each time the file has changed and is valid."""
    seen: tuple[int, int, int] | None = None
    while True:
        stamp = await asyncio.to_thread(_stamp, path)
        if stamp is not None and stamp != seen:
            seen = stamp
            try:
                yield (*fixed, *await asyncio.to_thread(read_file, path, tuple(fixed)))
            except ConfigError as error:
                _log.error("%s; the last good list stays in force", error)
        await asyncio.sleep(poll_seconds)


def read_file(path: Path, fixed: tuple[ReplicaSettings, ...] = ()) -> tuple[ReplicaSettings, ...]:
    """The list in a file; raises ConfigError."""
    try:
        documents = parse_documents(path.read_text())
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


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
