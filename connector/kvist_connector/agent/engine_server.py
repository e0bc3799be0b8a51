"""The Unix socket on which engines connect. One agent a socket; a stale file is replaced."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvist_connector.agent.session import Session
from kvist_connector.errors import ConfigError

# sun_path on Linux, with its final zero.
_MAX_SOCKET_PATH = 107


class EngineServer:
    """Listens from `start` to `close`."""

    def __init__(self, path: Path, session: Callable[[], Session]) -> None:
        self._path = path
        self._session = session
        self._lock = -1
        self._server: asyncio.Server | None = None

    def claim(self) -> None:
        """Refuse when another agent has this socket; called before anything else is touched."""
        if len(os.fsencode(self._path)) > _MAX_SOCKET_PATH:
            raise ConfigError(
                f"socket: {self._path} is longer than the {_MAX_SOCKET_PATH} bytes a Unix socket may have"
            )
        if os.path.lexists(self._path) and not self._path.is_socket():
            raise ConfigError(f"socket: {self._path} exists and is no socket: remove it or give another path")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.with_name(self._path.name + ".lock")
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = -1
            raise ConfigError(f"socket: {self._path} is served by another agent: stop it first") from error
        except OSError as error:
            raise ConfigError(f"socket: {self._path} cannot be used: {error.strerror}") from error

    async def start(self) -> None:
        """Accept connections; only this user may connect."""
        before = os.umask(0o177)
        try:
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.get_running_loop().create_unix_server(
                self._session, str(self._path), backlog=128
            )
        except OSError as error:
            raise ConfigError(f"socket: {self._path} cannot be used: {error.strerror}") from error
        finally:
            os.umask(before)

    async def close(self) -> None:
        """Stop accepting and give the socket up; open connections are their sessions' business."""
        if self._server is not None:
            self._server.close()
            with suppress(OSError):  # the next agent replaces it
                self._path.unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
