"""Who the peers are now: the addresses behind `peer.urls`, without our own.

A name may stand for many agents that come and go (a headless Service), so names are looked up
again and again; one that cannot be looked up leaves what it stood for in force. Called by agent.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from kvist_connector.agent.peer_settings import PeerSettings
from kvist_connector.errors import TierError

log = logging.getLogger(__name__)
# Everybody is asked at every lookup.
MOST: Final = 64
REFRESH_SECONDS: Final = 10.0
# While nobody is known yet: agents of a pool start together.
FIRST_SECONDS: Final = 1.0
_RESOLVE_SECONDS: Final = 5.0
# Addresses of a host; raises TierError.
Resolve = Callable[[str], Awaitable[Iterable[str]]]


async def resolve(host: str) -> list[str]:
    """By the system's resolver."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_RESOLVE_SECONDS):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name that cannot be one is the latter
        raise TierError(f"peer.urls: {host} cannot be looked up: {str(error) or 'no answer'}") from error
    return [str(address[0]) for *_, address in found]


class Roster:
    """`addresses` of the moment; `changed` is told each new list."""

    def __init__(
        self,
        settings: PeerSettings,
        resolve: Resolve = resolve,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._own = settings.address
        self._resolve = resolve
        self._sleep = sleep
        # By URL: what it stands for. A numeric address stands for itself.
        self._behind: dict[str, list[str]] = {url: [url] if _numeric(url) else [] for url in settings.urls}
        self._failed: set[str] = set()
        self._crowded = False
        self.addresses = self._all()
        self.changed: Callable[[Sequence[str]], Awaitable[None]] = _nobody

    async def run(self) -> None:
        """Look names up for ever."""
        if all(_numeric(url) for url in self._behind):
            await asyncio.Event().wait()
        while True:
            await self.refresh()
            await self._sleep(REFRESH_SECONDS if self.addresses else FIRST_SECONDS)

    async def refresh(self) -> None:
        """Look every name up once."""
        await asyncio.gather(*(self._look_up(url) for url in self._behind if not _numeric(url)))
        found = self._all()
        if found != self.addresses:
            self.addresses = found
            await self.changed(found)

    async def _look_up(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            hosts = await self._resolve(parts.hostname or "")
        except TierError as error:
            if url not in self._failed:  # once, until it works again
                log.warning("%s; the last addresses stay in force", error)
            self._failed.add(url)
            return
        self._failed.discard(url)
        self._behind[url] = [_url(host, parts.port) for host in hosts]

    def _all(self) -> tuple[str, ...]:
        found = sorted({address for behind in self._behind.values() for address in behind} - {self._own})
        if len(found) > MOST and not self._crowded:
            log.warning("peer.urls: %d addresses, only the first %d are asked", len(found), MOST)
        self._crowded = len(found) > MOST
        return tuple(found[:MOST])


def _numeric(url: str) -> bool:
    try:
        ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return False
    return True


def _url(host: str, port: int | None) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _nobody(_: Sequence[str]) -> None:
    """Nobody wants to know."""
