"""All other routers of the cluster: looks their names up, follows each, and says how many are not heard.

Called by compose.py, one for a mind. Decide apart from act: `changes` compares, `_apply` starts and stops.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from kvist_router.metrics import MindMetrics
from kvist_router.mind.neighbours.reader import DispatchReader, Neighbour
from kvist_router.mind.neighbours.settings import MAX_NEIGHBOURS, NeighbourSettings
from kvist_router.mind.supervise import supervised

_PORT: Final = 80
_log = logging.getLogger(__name__)


def changes(current: Collection[str], wanted: Collection[str]) -> tuple[list[str], list[str]]:
    """(to stop, to follow), of at most MAX_NEIGHBOURS."""
    most = sorted(wanted)[:MAX_NEIGHBOURS]
    return [url for url in current if url not in most], [url for url in most if url not in current]


class Circle:
    """`unheard` is what widens the tie band."""

    def __init__(self, settings: NeighbourSettings, reader: DispatchReader, metrics: MindMetrics) -> None:
        self._settings, self._reader, self._metrics = settings, reader, metrics
        self._neighbours: dict[str, Neighbour] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._resolved: dict[str, list[str]] = {}
        metrics.neighbours.labels("heard").set_function(lambda: len(self.others) - self.unheard)
        metrics.neighbours.labels("unheard").set_function(lambda: self.unheard)

    @property
    def others(self) -> list[Neighbour]:
        """Those that are not this router, nor one that is heard already."""
        return [item for item in self._neighbours.values() if not (item.is_self or item.is_twin)]

    @property
    def unheard(self) -> int:
        """Routers that are there, as far as names tell, and whose dispatches are not known."""
        return sum(not item.heard for item in self.others)

    async def follow(self) -> None:
        """Look names up and follow who is there, for ever."""
        while True:
            await self._apply([url for urls in await self._lookups() for url in urls])
            await asyncio.sleep(self._settings.lookup_seconds)

    async def close(self) -> None:
        """Stop following."""
        await self._apply(())

    def describe(self) -> list[dict[str, Any]]:
        """For the admin port."""
        return [
            {"url": item.url, "router": item.router, "heard": item.heard, "problem": item.problem}
            for item in self.others
        ]

    async def _lookups(self) -> Sequence[list[str]]:
        return await asyncio.gather(*(self._lookup(url) for url in self._settings.urls))

    async def _lookup(self, url: str) -> list[str]:
        """The addresses behind a name; those of the last time while it does not resolve."""
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(self._settings.lookup_seconds):
                found = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname, parts.port or _PORT, type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError) as error:
            _log.debug("%s does not resolve: %s", url, error)
            return self._resolved.get(url, [])
        # One family: a router has an address in each, and listens in one of them.
        family = min((address[0] for address in found), default=socket.AF_INET)
        self._resolved[url] = sorted({_at(parts, str(at[4][0])) for at in found if at[0] == family})
        return self._resolved[url]

    async def _apply(self, wanted: Collection[str]) -> None:
        stop, start = changes(self._neighbours, wanted)
        tasks = [self._tasks.pop(url) for url in stop]
        for url, task in zip(stop, tasks, strict=True):
            del self._neighbours[url]
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for url in start:
            neighbour = self._neighbours[url] = Neighbour(url)
            run = partial(self._reader.run, neighbour)
            self._tasks[url] = asyncio.create_task(supervised("neighbour", run, self._metrics))


def _at(parts: SplitResult, address: str) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"{parts.scheme}://{host}:{parts.port or _PORT}{parts.path}"
