"""What simulated routers tell each other, and when it arrives. Called by ours.py."""

from __future__ import annotations

from collections import deque

from kvist_router.mind.inflight import InFlight
from kvist_router.mind.neighbours.known import Known
from kvist_router.mind.neighbours.messages import Ended, Prefilled, Said
from kvist_router.mind.neighbours.publisher import dispatched


class Wire:
    """From one router to another, `lag` seconds long."""

    def __init__(self, known: Known, lag: float) -> None:
        self._known, self._lag = known, lag
        self._under_way: deque[tuple[float, Said]] = deque()

    def put(self, message: Said, now: float) -> None:
        """Say something."""
        self._under_way.append((now + self._lag, message))

    def deliver(self, now: float) -> None:
        """What has arrived by now is heard."""
        while self._under_way and self._under_way[0][0] <= now:
            at, message = self._under_way.popleft()
            self._known.hear(message, at)


class Teller:
    """An `inflight.Watcher` that says everything on all of its wires; `now` is the simulation's time."""

    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self.now = 0.0

    def began(self, entry: InFlight) -> None:
        """See inflight.Watcher."""
        self._say(dispatched(entry, self.now) if self.wires else None)

    def prefilled(self, entry: InFlight) -> None:
        """See inflight.Watcher."""
        self._say(Prefilled(request=entry.id))

    def ended(self, entry: InFlight) -> None:
        """See inflight.Watcher."""
        self._say(Ended(request=entry.id))

    def _say(self, message: Said | None) -> None:
        if message is not None:
            for wire in self.wires:
                wire.put(message, self.now)
