"""uvicorn servers that share one loop and one pair of signals. Called by app.py and in processes/.

SIGTERM or SIGINT: say so to `on_stop`, serve on for the grace time, stop listening, let running answers
end within the drain time, exit. Each further one skips to the next of these steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from kvist_connector.errors import ConfigError
from kvist_router.accepting import Acceptor
from kvist_router.inbound import inbound
from kvist_router.settings import LimitSettings
from kvist_router.stopping import at_signals

BACKLOG = 2048
_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Leaves the process's signals to `serve`. `shared`: other processes have its socket too."""

    def __init__(self, config: uvicorn.Config, shared: bool) -> None:
        super().__init__(config)
        self._shared = shared

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        if not self._shared:
            await super().startup(sockets)
            return
        await super().startup([])
        for listener in sockets or ():
            acceptor = Acceptor(listener, self._protocol, self.config.ssl)
            self.servers.append(acceptor)  # type: ignore[arg-type] # of a server, only its end is used

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

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


def url_of(listener: socket.socket, tls: bool) -> str:
    """Where a listening socket is."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, slots=True)
class Served:
    """An app on its socket, behind TLS if there is a context."""

    app: ASGIApp
    listener: socket.socket
    tls: ssl.SSLContext | None = None
    shared: bool = False  # with other processes

    @property
    def url(self) -> str:
        """Where it is."""
        return url_of(self.listener, self.tls is not None)


class Servers:
    """Apps on their sockets. `run` returns after `stop`, grace and drain."""

    def __init__(
        self,
        served: Sequence[Served],
        limits: LimitSettings,
        grace_seconds: float = 0.0,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._servers = [(_Server(_config(item, limits), item.shared), item.listener) for item in served]
        self._grace_seconds = grace_seconds
        self._on_stop = on_stop
        self._grace: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Serve until `stop` and what follows."""
        async with asyncio.TaskGroup() as group:
            for server, listener in self._servers:
                group.create_task(server.serve(sockets=[listener]))

    async def run_until_signal(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        with at_signals(self.stop):
            await self.run()

    def stop(self) -> None:
        """The next step towards the end: grace, drain, at once."""
        if self._grace is None:
            self.announce()
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self._grace_seconds, self.close)
            _log.info("stopping: requests are taken for %g s more", self._grace_seconds)
            if self._grace_seconds > 0:
                return
        self._grace.cancel()
        self.close()

    def announce(self) -> None:
        """Say that the end is near; everything is served still."""
        self._on_stop()

    def close(self) -> None:
        """Drain; the second call ends running answers at once."""
        again = any(server.should_exit for server, _ in self._servers)
        _log.info("ending running answers" if again else "closed: running answers may end")
        for server, _ in self._servers:
            server.force_exit = server.should_exit
            server.should_exit = True


@contextlib.asynccontextmanager
async def serving(served: Served, limits: LimitSettings) -> AsyncIterator[None]:
    """Within, the app is served; at the end at once no more, and its listener is closed."""
    server = _Server(_config(served, limits), served.shared)
    task = asyncio.create_task(server.serve(sockets=[served.listener]))
    try:
        yield
    finally:
        if server.started:  # it looks ten times a second whether it is to end, and goes on till then
            for listening in server.servers:
                listening.close()
        server.should_exit = server.force_exit = True
        await task


def _config(served: Served, limits: LimitSettings) -> uvicorn.Config:
    context = served.tls
    return uvicorn.Config(
        served.app,
        http=inbound(limits),
        ssl_context_factory=None if context is None else lambda config, default: context,
        loop="none",
        lifespan="off",
        ws="none",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        log_level="warning",  # of uvicorn's own lines, which there would be twice
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(limits.drain_seconds)),
        backlog=BACKLOG,
    )
