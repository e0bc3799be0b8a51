"""What is retired, known to every agent in the end: those that missed it get no requests until they have it.

    retire -> every agent asked -> who acknowledged has it; the others are `behind`
    ever after: who is behind, or came back, is told all that is known, and tells what it knows

The router keeps nothing on disk: agents do, and one of them is enough to bring a rule back to all.
Called by app.py (`run`) and routes.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from kvist_connector import names
from kvist_connector.protocol.retired import MAX_RULES, Retired
from kvist_router.controls.fanout import FanOut
from kvist_router.mind.replica import Replica

TICK_SECONDS = 0.1
RETRY_SECONDS = 1.0
# What other routers have spread comes by way of the agents.
REFRESH_SECONDS = 10.0


class Spreader:
    """`replicas` is the mind's own map."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        fanout: FanOut,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._replicas = replicas
        self._fanout = fanout
        self._clock = clock
        self._pause = pause
        self._confirmed: dict[str, tuple[int, Retired]] = {}  # agent's epoch and what it had
        self._asked: dict[str, tuple[int, float]] = {}  # its epoch then, and when
        self.known = Retired()

    def next_epoch(self) -> int:
        """Above all that is known; milliseconds of Unix time, so that routers hardly ever choose the same."""
        return max(int(time.time() * 1000), self.known.epoch + 1)

    def took(self, replica: Replica, answer: dict[str, Any]) -> None:
        """An agent acknowledged a rule."""
        rules = {str(rule): int(epoch) for rule, epoch in dict(answer["rule"]).items()}
        rule = Retired(epoch=max(rules.values(), default=0), rules=rules)
        self.known = self.known.merge(rule)
        _, before = self._confirmed.get(replica.name, (0, Retired()))
        self._confirmed[replica.name] = (_agent_epoch(replica), before.merge(rule))

    def judge(self) -> list[str]:
        """Mark who is behind; their names."""
        behind = []
        for name, replica in self._replicas.items():
            replica.behind = replica.agent is not None and not self._current(replica)
            if replica.behind:
                behind.append(name)
        for gone in self._asked.keys() - self._replicas.keys():
            del self._asked[gone]
            self._confirmed.pop(gone, None)
        return behind

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.tick()
            await self._pause(TICK_SECONDS)

    async def tick(self) -> None:
        """Tell and ask whom it concerns."""
        now = self._clock()
        due = [replica for replica in self._replicas.values() if self._due(replica, now)]
        self.judge()
        await asyncio.gather(*(self._exchange(replica, now) for replica in due))
        self.judge()

    def _due(self, replica: Replica, now: float) -> bool:
        asked = self._asked.get(replica.name)
        if replica.agent is None or asked is None:
            return replica.agent is not None
        run, at = asked
        wait = REFRESH_SECONDS if self._fresh(replica) else RETRY_SECONDS
        return run != _agent_epoch(replica) or now - at >= wait

    async def _exchange(self, replica: Replica, now: float) -> None:
        epoch = _agent_epoch(replica)
        self._asked[replica.name] = (epoch, now)
        body = {"retired": msgspec.to_builtins(self.known)}
        answer = await self._fanout.ask_one(replica, names.PATH_RETIRED, body)
        try:
            theirs = msgspec.convert(answer["retired"], Retired)
        except (KeyError, msgspec.ValidationError):
            return  # it stays behind, and is asked again
        if len(theirs.rules) <= MAX_RULES:
            self._confirmed[replica.name] = (epoch, theirs)
            self.known = self.known.merge(theirs)

    def _current(self, replica: Replica) -> bool:
        return not self.known.epoch or self._fresh(replica)

    def _fresh(self, replica: Replica) -> bool:
        """Whether this very run of the agent has confirmed all that is known."""
        found = self._confirmed.get(replica.name)
        return found is not None and found[0] == _agent_epoch(replica) and found[1].covers(self.known)


def _agent_epoch(replica: Replica) -> int:
    opening = replica.mirror.opening
    return opening.epoch if opening is not None else 0
