"""Made-up workloads for the eviction rule: on which it must not lose, and where no public trace is at hand.

Every one is a stream of prompts as block ids, from a seed. Lengths, pauses and popularity are
drawn from heavy-tailed distributions as reported of served models: most sessions end after a turn or
two, some go on for long; a few system prompts and documents are in most prompts; much is never seen again.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from typing import Final

from kvist_connector.eviction import Trace, trace_of

_BLOCK: Final = 512
_HOUR: Final = 3600.0
Request = tuple[float, int, list[int]]  # seconds, tokens, blocks


class _Ids:
    """Fresh block ids, and the blocks of a text that grows."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def fresh(self, count: int) -> list[int]:
        return [next(self._next) for _ in range(count)]

    def prompt(self, blocks: list[int], tail: int) -> tuple[int, list[int]]:
        """Whole blocks and a shorter last one, which is another block once the text goes on."""
        return len(blocks) * _BLOCK + tail, [*blocks, *self.fresh(1)]


def chat(
    rng: random.Random,
    ids: _Ids,
    rate: float,
    hours: float,
    first: float = 5,
    again: float = 0.35,
    pause: float = 80,
) -> Iterator[Request]:
    """Conversations: the next turn comes after a pause and repeats all before it."""
    systems = [ids.fresh(rng.choice((0, 1, 1, 2, 4, 8))) for _ in range(24)]
    for start in _arrivals(rng, rate, hours):
        text = [*systems[_zipf(rng, len(systems), 1.3)], *ids.fresh(_blocks(rng, first, 1.2, 240))]
        now, go_on = start, again
        while now < hours * _HOUR:
            yield now, *ids.prompt(text, rng.randint(1, _BLOCK - 1))
            if rng.random() > go_on:
                break
            go_on = min(again + 0.5, go_on + 0.15)
            text = [*text, *ids.fresh(_blocks(rng, 2, 1.0, 60))]
            now += pause * rng.lognormvariate(0, 1.1)


def slow_chat(rng: random.Random, ids: _Ids, rate: float, hours: float) -> Iterator[Request]:
    """Long prompts, long pauses, and most people ask once."""
    return chat(rng, ids, rate, hours, first=10, again=0.25, pause=150)


def documents(rng: random.Random, ids: _Ids, rate: float, hours: float) -> Iterator[Request]:
    """Questions about documents, some of which everybody reads."""
    library = [ids.fresh(_blocks(rng, 30, 0.9, 240)) for _ in range(1500)]
    system = ids.fresh(1)
    for start in _arrivals(rng, rate, hours):
        text = [*system, *library[_zipf(rng, len(library), 0.8)]]
        now = start
        while now < hours * _HOUR:
            asked = [*text, *ids.fresh(_blocks(rng, 1, 0.5, 4) - 1)]
            yield now, *ids.prompt(asked, rng.randint(1, _BLOCK - 1))
            if rng.random() > 0.5:
                break
            now += rng.lognormvariate(4.0, 1.0)


def agents(rng: random.Random, ids: _Ids, rate: float, hours: float) -> Iterator[Request]:
    """Programs that call tools: many quick turns on one of a few long prompts."""
    tools = [ids.fresh(rng.randint(4, 16)) for _ in range(8)]
    for start in _arrivals(rng, rate, hours):
        text, now = [*tools[_zipf(rng, len(tools), 1.0)], *ids.fresh(_blocks(rng, 2, 0.8, 40))], start
        for _ in range(1 + int(rng.expovariate(1 / 5))):
            yield now, *ids.prompt(text, rng.randint(1, _BLOCK - 1))
            text = [*text, *ids.fresh(_blocks(rng, 2, 0.9, 30))]
            now += rng.lognormvariate(2.0, 0.8)


def once(rng: random.Random, ids: _Ids, rate: float, hours: float) -> Iterator[Request]:
    """Long prompts that nobody sends again."""
    for now in _arrivals(rng, rate, hours):
        yield now, *ids.prompt(ids.fresh(_blocks(rng, 12, 1.0, 240)), rng.randint(1, _BLOCK - 1))


_MIXES: Final = {
    "chat": ((chat, 1.2),),
    "slow": ((slow_chat, 1.8),),
    "documents": ((documents, 0.5),),
    "agents": ((agents, 0.3),),
    "all": ((chat, 0.6), (documents, 0.2), (agents, 0.06), (once, 0.3)),
}


def names() -> list[str]:
    """Of the workloads."""
    return list(_MIXES)


def workload(name: str, seed: int, hours: float = 1.0) -> Trace:
    """One of `names()`, the same for the same seed."""
    rng, ids = random.Random(f"{name}-{seed}"), _Ids()
    streams = [sorted(make(rng, ids, rate, hours)) for make, rate in _MIXES[name]]
    return trace_of((tokens, blocks) for _, tokens, blocks in heapq.merge(*streams))


def _arrivals(rng: random.Random, rate: float, hours: float) -> Iterator[float]:
    now = rng.expovariate(rate)
    while now < hours * _HOUR:
        yield now
        now += rng.expovariate(rate)


def _blocks(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * rng.lognormvariate(0, sigma))))


def _zipf(rng: random.Random, count: int, power: float) -> int:
    """Popularity falls with rank to the `power`; by inversion of the continuous form."""
    if abs(power - 1) < 1e-9:
        return min(count - 1, int(count ** rng.random()) - 1)
    reach = (count + 1) ** (1 - power) - 1
    return min(count - 1, int((1 + reach * rng.random()) ** (1 / (1 - power))) - 1)
