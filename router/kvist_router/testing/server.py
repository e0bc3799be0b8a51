"""An aiohttp application on a free port of 127.0.0.1. Base of the stand-ins."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from aiohttp import web


class LocalServer:
    """`async with` starts and stops it; `url` is its address. Handlers are cancelled when the peer goes."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._runner: web.AppRunner | None = None
        self.url = ""

    def application(self) -> web.Application:
        """The routes; subclasses give them."""
        raise NotImplementedError

    async def start(self) -> None:
        """Listen; the same port again after `stop`."""
        self._runner = web.AppRunner(self.application(), handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Close every connection and the listener."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
