"""A relay's mind: the one in its own process while that is there, else by hash. Called by relay_side.py.

A mind that has just come back would scatter what is cached, so it is asked again when it has a view of the
replicas (its `problem` is empty) or had the time to get one. The log says each change once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from kvist_router.metrics import RelayMetrics
from kvist_router.mind.fallback import GONE, HashMind
from kvist_router.mind.interface import Decision, Metadata, Refusal, Report, View
from kvist_router.mind.socket import MindClient

PAUSE_SECONDS = 0.1
NOT_YET = "the router's mind has not answered yet"
STOPPING = "the router is stopping"
_log = logging.getLogger(__name__)


class RemoteMind:
    """`interface.Mind` and `interface.Outlook` of a relay; `follow` runs as long as the relay does.

    A `fallback` with a view has it from another relay.

    `view_seconds`: how long a mind that came back may take to have a view. `keep` hears of all replicas.
    """

    def __init__(
        self,
        path: Path,
        fallback: HashMind,
        metrics: RelayMetrics,
        keep: Callable[[Collection[str]], None],
        view_seconds: float,
        silent_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = MindClient(path, self._told, silent_seconds)
        self._fallback = fallback
        self._metrics = metrics
        self._keep = keep
        self._view_seconds = view_seconds
        self._clock = clock
        self._view = fallback.view or View(NOT_YET, {}, (), ())
        # It was there, for this relay or for the one before it, and has no view (again) since.
        self._gone = fallback.view is not None
        self._since: float | None = None  # of this connection: when it first spoke
        self._stopping = False
        self._problem = ""

    # ---- interface.Mind

    async def decide(self, body: bytes, metadata: Metadata) -> Decision | Refusal:
        """See interface.Mind."""
        if not self._gone:
            answer = await self._client.decide(body, metadata)
            if answer is not GONE:
                return answer
        found = await self._fallback.decide(body, metadata)
        if isinstance(found, Decision):
            self._metrics.without_mind.inc()
        return found

    async def report(self, request_id: str, report: Report) -> None:
        """See interface.Mind."""
        mine = self._fallback if self._fallback.knows(request_id) else self._client
        await mine.report(request_id, report)

    # ---- interface.Outlook

    def view(self) -> View:
        """The mind's last, with the problem of this relay."""
        if self._stopping:
            return msgspec.structs.replace(self._view, problem=STOPPING)
        if self._gone:
            return msgspec.structs.replace(self._view, problem="")
        return self._view

    def degraded(self) -> str:
        """Why requests go by hash; empty when they do not."""
        if not self._gone:
            return ""
        why = (
            f"is gone ({self._problem or NOT_YET})" if self._since is None else "is back and has no view yet"
        )
        return f"the router's mind {why}: requests go by hash of their prompts' beginnings"

    def stop(self) -> None:
        """See interface.Outlook."""
        self._stopping = True

    # ---- following

    async def follow(self) -> None:
        """Stay connected, for ever."""
        while True:
            problem = await self._client.follow()
            if not self._gone and self._fallback.view is not None:
                _log.error("the mind is gone: %s; requests go by hash until it is back", problem)
                self._gone = True
            self._problem, self._since = problem, None
            await asyncio.sleep(PAUSE_SECONDS)

    def _told(self, view: View) -> None:
        now = self._clock()
        if self._since is None:
            self._since = now
        if self._gone:
            if view.problem and now - self._since < self._view_seconds:
                return  # what the last one knew is better than what this one knows yet
            if self._problem:
                _log.warning("the mind is back")
            self._gone = False
        self._view = view
        if view.replicas:
            self._fallback.view = view
        self._keep(view.names)
