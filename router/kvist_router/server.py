"""uvicorn servers that share one loop and one pair of signals. Called by app.py.

SIGTERM or SIGINT: stop listening, let running answers end within the drain time, exit. A second one
ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kvist_connector.errors import ConfigError

BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves the process's signals to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


def listen(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket; raises ConfigError naming the setting when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{setting}: cannot listen on {host}:{port} ({error.strerror}); choose another with --{setting}"
        ) from error
    listener.setblocking(False)
    return listener


class Servers:
    """Apps on their sockets. `run` returns after `stop` and the drain."""

    def __init__(self, apps: list[tuple[ASGIApp, socket.socket]], drain_seconds: float) -> None:
        self._servers = [(_Server(_config(app, drain_seconds)), listener) for app, listener in apps]

    async def run(self) -> None:
        """Serve until `stop`."""
        async with asyncio.TaskGroup() as group:
            for server, listener in self._servers:
                group.create_task(server.serve(sockets=[listener]))

    async def run_until_signal(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self.run()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Drain; the second call ends running answers at once."""
        for server, _ in self._servers:
            server.force_exit = server.should_exit
            server.should_exit = True


def _config(app: ASGIApp, drain_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        loop="none",
        lifespan="off",
        ws="none",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        backlog=BACKLOG,
    )
