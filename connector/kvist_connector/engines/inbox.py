"""Agent messages on their way from the client's thread to the scheduler's. Torch-free.

The scheduler half drains it at every hook, so all its state lives on one thread. The
bound is there for an engine that runs no step for long while the agent goes on talking:
when it is reached the connection is dropped and begun anew.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvist_connector.engines.agent_client import AgentClient
from kvist_connector.errors import AgentGone
from kvist_connector.protocol.engine import ToEngine, Welcome

MAX_MESSAGES = 65536


@dataclass(frozen=True)
class Closed:
    """The connection is gone: everything that belonged to it is void."""

    reason: str


@dataclass(frozen=True)
class Arrival:
    """A message and the monotonic time it came."""

    at: float
    message: ToEngine | Closed


class Inbox:
    """Implements agent_client.Handler. Any thread puts, one takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, limit: int = MAX_MESSAGES) -> None:
        self._clock = clock
        self._limit = limit
        self._arrivals: deque[Arrival] = deque()
        self._changed = threading.Condition()

    def opened(self, welcome: Welcome) -> None:
        self._put(welcome)

    def received(self, message: ToEngine) -> None:
        self._put(message)

    def closed(self, reason: str) -> None:
        self._put(Closed(reason))

    def take(self) -> list[Arrival]:
        """Everything that has arrived."""
        if not self._arrivals:
            return []
        with self._changed:
            taken = list(self._arrivals)
            self._arrivals.clear()
        return taken

    def wait(self, seconds: float) -> bool:
        """Until something is there or the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._arrivals), seconds)

    def _put(self, message: ToEngine | Closed) -> None:
        with self._changed:
            if len(self._arrivals) >= self._limit and not isinstance(message, Closed | Welcome):
                self._arrivals.clear()
                raise AgentGone(f"{self._limit} messages were not read: the engine runs no steps")
            self._arrivals.append(Arrival(self._clock(), message))
            self._changed.notify_all()


class AgentLink:
    """The scheduler half's end of the connection: what it sends, and the inbox it drains."""

    def __init__(self, client: AgentClient, inbox: Inbox) -> None:
        self._client = client
        self._inbox = inbox
        self.send = client.send
        self.take = inbox.take
        self.wait = inbox.wait

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
