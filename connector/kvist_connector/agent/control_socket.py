"""The HTTP API on a Unix socket beside the engine's, `SOCKET.control`, for commands in the same pod.

No token is asked there: only this user can open it. It is what a container's preStop has, which
knows neither port nor token.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from kvist_connector.errors import ConfigError

log = logging.getLogger(__name__)
# sun_path on Linux, with its final zero.
_MAX_SOCKET_PATH = 107


def control_path(socket: Path) -> Path:
    """Where the agent of an engine socket takes commands."""
    return socket.with_name(socket.name + ".control")


class ControlSocket:
    """Beside the socket `path`, whose lock (engine_server.py) also makes this one ours."""

    def __init__(self, path: Path) -> None:
        self._path = control_path(path)
        self._listening = False

    async def listen(self, runner: web.AppRunner) -> None:
        """Serve the application there too, unless the path is too long: then only over HTTP."""
        if len(os.fsencode(self._path)) > _MAX_SOCKET_PATH:
            log.warning(
                "%s is longer than the %d bytes a Unix socket may have: no commands are taken there",
                self._path,
                _MAX_SOCKET_PATH,
            )
            return
        before = os.umask(0o177)
        try:
            self._path.unlink(missing_ok=True)
            await web.UnixSite(runner, self._path).start()
        except OSError as error:
            raise ConfigError(f"socket: {self._path} cannot be used: {error.strerror}") from error
        finally:
            os.umask(before)
        self._listening = True

    def remove(self) -> None:
        """The socket's file; the runner has closed the socket."""
        if self._listening:
            with suppress(OSError):  # the next agent replaces it
                self._path.unlink(missing_ok=True)
