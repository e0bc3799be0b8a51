"""Workers: who lives, who may still be writing, and asking them to come to rest.

Life is the lock file of a member (arena/locks.py), not its connection: a worker whose socket
broke may still copy. While slots wait in quarantine the locks are asked once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from kvist_connector.agent.memory import MemoryTier
from kvist_connector.agent.session import Session
from kvist_connector.agent.slots import UNKNOWN
from kvist_connector.arena.locks import living_members
from kvist_connector.protocol.engine import Quiesce

CHECK_SECONDS = 1.0
log = logging.getLogger(__name__)


class Members:
    """Workers of one arena."""

    def __init__(self, arena: Path, memory: MemoryTier) -> None:
        self.arena = arena
        self._memory = memory
        self._workers: dict[str, Session] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.on_free: Callable[[], None] = lambda: None

    def living(self) -> set[str]:
        """Members whose lock is held; UNKNOWN is among them when that cannot be seen now."""
        try:
            return living_members(self.arena)
        except OSError as error:  # no file can be opened: somebody may have taken all there are
            log.warning(
                "%s: %s: slots of a lost engine wait until its workers can be looked for", self.arena, error
            )
            return {UNKNOWN, *self._workers}

    def users(self, asking: Session, sessions: Iterable[Session]) -> int:
        """Living or connected workers that use the present layout, but for the one that asks."""
        connected = {session.member for session in sessions if session.registered}
        return len((self.living() | connected) - {asking.member})

    def connected(self, session: Session) -> None:
        """A worker's connection opened; it may owe an acknowledgement from before."""
        self._workers[session.member] = session
        slots = self._memory.slots
        if slots is not None and session.member in slots.awaited():
            session.send(Quiesce(ticket=slots.ticket))

    def disconnected(self, session: Session) -> None:
        """A connection ended; the worker may still live."""
        if self._workers.get(session.member) is session:
            del self._workers[session.member]

    def quiesced(self, member: str, ticket: int) -> None:
        """A worker came to rest."""
        if self._memory.slots is not None:
            self._memory.slots.acknowledge(member, ticket)

    def settle(self) -> None:
        """After a quarantine: ask everybody who may still write, and watch the locks."""
        slots = self._memory.slots
        if slots is None:
            return
        awaited = slots.awaited()
        for member in awaited:
            session = self._workers.get(member)
            if session is not None:
                session.send(Quiesce(ticket=slots.ticket))
        self._watch()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        slots = self._memory.slots
        if self._timer is None and slots is not None and slots.awaited():
            self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        self._timer = None
        slots = self._memory.slots
        living = self.living()
        if slots is not None and UNKNOWN not in living:
            late = UNKNOWN in slots.awaited()
            if slots.bury(living):
                self.on_free()
            if late:
                self.settle()
        self._watch()
