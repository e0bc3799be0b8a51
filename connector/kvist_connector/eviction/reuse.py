"""The cost-aware default: seconds saved x chance of reuse / bytes, the chance learned while it runs.

Chunks are told apart by what is known of them and of the request that used them last: uses, turn of the
conversation, share of the prompt that was found, length of prompt and answer, whether their chain goes
on. How often each kind is used again at each age is learned (`factors.py`), and from it follows the worth of
keeping a chunk of its age (`rates.py`): its Gittins index, by which the best order to serve is known
when each candidate lives by itself (Gittins 1979; for caches "hit density", Beckmann et al., NSDI 2018).

Evicted chunks are remembered, so that a use that came too late counts as a use and not as an end.
Those whose life goes on count for the ages that they have reached: without them a large tier would know only
of what was used again quickly. Age counts uses and entries in the tier, not time: a quiet night ages
nothing. Until much is known the chance falls with age alike in all kinds, which is the order of LRU.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvist_connector.eviction import rates
from kvist_connector.eviction.candidate import NEVER, Candidate
from kvist_connector.eviction.factors import Factors, Seen
from kvist_connector.eviction.visit import Visit, cell, kind, place

_FEWEST_GHOSTS: Final = 64
_GHOSTS: Final = 3  # for each chunk in the tier
_WINDOWS: Final = 512  # at most twice as many tell when the lives under way began
_OFTEN: Final = 256  # ticks between two fits at first,
_SELDOM: Final = 2000  # later,
_PART: Final = 4  # and in a large tier this part of its chunks
_KEEP: Final = 0.97  # of what was learned counts after each fit
_FORGOTTEN: Final = 0.01  # lives
_OCTAVES: Final = 128  # of seconds / byte, around 1


def _zeros() -> array[float]:
    return array("d", bytes(8 * rates.BUCKETS))


@dataclass(slots=True)
class _Cell:
    """What chunks of one kind did, by bucket of age, and since when others live."""

    uses: array[float] = field(default_factory=_zeros)
    ends: array[float] = field(default_factory=_zeros)
    begun: Counter[int] = field(default_factory=Counter)  # lives under way, by window of their first tick

    def take(self, number: int, tick: int, window: int) -> Seen:
        """What was seen until `tick`, which counts less from now on."""
        middle = window // 2
        ages = ((max(1, tick - at * window - middle), lives) for at, lives in self.begun.items())
        seen = Seen(kind(number), self.uses, rates.exposure(self.uses, self.ends, ages))
        self.uses = array("d", (_KEEP * count for count in self.uses))
        self.ends = array("d", (_KEEP * count for count in self.ends))
        return seen

    @property
    def empty(self) -> bool:
        return not self.begun and sum(self.uses) + sum(self.ends) < _FORGOTTEN


@dataclass(frozen=True, slots=True)
class _Ghost:
    visit: Visit
    place: int
    tick: int
    hits: int


class CostAware:
    """Least chance of reuse for its weight leaves first. Memory: three ghosts a chunk, and for each kind
    that is seen (5,760 at most, some hundreds in practice) two counts for each of 56 ages.

    With `known` it does not learn: that is for asking what knowing it from the start would be worth.
    """

    def __init__(self, known: Factors | None = None) -> None:
        self._learns = known is None
        self._cells: dict[int, _Cell] = {}
        self._ghosts: OrderedDict[bytes, _Ghost] = OrderedDict()
        self._resident = 0
        self._tick = 0
        self._window = 64  # ticks
        self._fitted = 0  # tick at which the last fit began
        self._factors = known or Factors()
        self._fit: Iterator[None] | None = None  # under way
        self.revision = 0

    def learned(self) -> Factors:
        """From all that was seen until now, at once."""
        found = Factors()
        for _ in found.fit(self._seen()):
            pass
        return found

    def enter(self, candidate: Candidate, parent: Candidate | None) -> None:
        """It continues its parent; and it may come back."""
        self._advance(candidate.tick)
        if parent is not None and not parent.continued:
            self._live(_visit(parent), _place(parent), -1)
            parent.continued = True
            self._live(_visit(parent), _place(parent), 1)
        self._resident += 1
        ghost = self._ghosts.pop(candidate.key, None)
        if ghost is not None:
            self._over(ghost.visit, ghost.place).uses[rates.bucket(candidate.tick - ghost.tick)] += 1
            candidate.hits = ghost.hits + 1
        self._learn()
        self._join(candidate, parent, candidate.tick, candidate.hits - 1)

    def use(self, candidate: Candidate, parent: Candidate | None, tick: int) -> None:
        """One life ends with a use, the next begins."""
        self._advance(tick)
        self._over(_visit(candidate), _place(candidate)).uses[rates.bucket(tick - candidate.tick)] += 1
        self._learn()
        self._join(candidate, parent, tick, candidate.hits)

    def answer(self, candidate: Candidate, chunks: int) -> None:
        """It and the chunks before it are of another kind now; these have one after them, so no queue."""
        visit = _visit(candidate)
        if visit.depth == candidate.depth + 1:
            visit.over, visit.answer = True, chunks
            self._recode(visit)

    def leave(self, candidate: Candidate, tick: int, evicted: bool) -> None:
        """It lives on as a ghost, or did not end by itself: then nothing is learned."""
        self._resident -= 1
        visit = _visit(candidate)
        if evicted:
            self._ghosts[candidate.key] = _Ghost(visit, _place(candidate), candidate.tick, candidate.hits)
        else:
            visit.closed = True
            self._over(visit, _place(candidate))
        while len(self._ghosts) > max(_GHOSTS * self._resident, _FEWEST_GHOSTS):
            _, ghost = self._ghosts.popitem(last=False)
            self._over(ghost.visit, ghost.place).ends[rates.bucket(tick - ghost.tick)] += 1

    def queue(self, candidate: Candidate, tick: int) -> int:
        """By kind, age and octave of seconds a byte."""
        octave = (
            math.frexp(candidate.weight / max(candidate.size, 1))[1] if candidate.weight > 0 else -_OCTAVES
        )
        worth = max(0, min(octave + _OCTAVES, 2 * _OCTAVES - 1))
        number = cell(_visit(candidate).code, _place(candidate))
        return (number * rates.BUCKETS + rates.bucket(tick - candidate.tick)) * 2 * _OCTAVES + worth

    def moves(self, candidate: Candidate, queue: int) -> int:
        """With the next bucket of age."""
        bucket = queue // (2 * _OCTAVES) % rates.BUCKETS
        return candidate.tick + rates.LEAVES[bucket] if bucket < rates.BUCKETS - 1 else NEVER

    def worth(self, candidate: Candidate, queue: int) -> float:
        """As `rank`: within a queue chunks do not differ."""
        return self.rank(queue)

    def rank(self, queue: int) -> float:
        """Seconds saved per byte and unit of time; within an octave chunks differ by kind and age only."""
        rest, worth = divmod(queue, 2 * _OCTAVES)
        number, bucket = divmod(rest, rates.BUCKETS)
        return math.ldexp(self._factors.values(number)[bucket], worth - _OCTAVES)

    def _join(self, candidate: Candidate, parent: Candidate | None, tick: int, uses: int) -> None:
        """Of a chunk that is used: the visit of the chunk before it, or a new one."""
        before = parent.visit if parent is not None else None
        if before is None or before is candidate.visit or before.closed or before.depth != candidate.depth:
            found, turn = (min(before.found, candidate.depth), before.turn) if before else (0, 0)
            before = Visit(tick, candidate.depth, candidate.depth, found, turn)
        candidate.visit = before
        before.extend(uses)
        self._recode(before)
        self._live(before, place(uses, candidate.continued), 1)

    def _recode(self, visit: Visit) -> None:
        """After a change of the visit: its lives count for another kind."""
        code = visit.encode()
        if code != visit.code:
            lives = list(visit.lives.items())
            for own, count in lives:
                self._live(visit, own, -count)
            visit.code = code
            for own, count in lives:
                self._live(visit, own, count)

    def _live(self, visit: Visit, own: int, more: int) -> _Cell:
        """So many lives more of the visit's chunks at that place."""
        number = cell(visit.code, own)
        found = self._cells.get(number)
        if found is None:
            found = self._cells[number] = _Cell()
        _add(visit.lives, own, more)
        _add(found.begun, visit.began // self._window, more)
        return found

    def _over(self, visit: Visit, own: int) -> _Cell:
        return self._live(visit, own, -1)

    def _advance(self, tick: int) -> None:
        self._tick = tick
        if tick // self._window >= _WINDOWS:
            self._window *= 2
            for found in self._cells.values():
                halved: Counter[int] = Counter()
                for number, lives in found.begun.items():
                    halved[number // 2] += lives
                found.begun = halved

    def _learn(self) -> None:
        """A step of the fit under way, or of the next once it is time."""
        if not self._learns:
            return
        if self._fit is None:
            pause = max(_OFTEN, min(_SELDOM, self._tick // _PART), self._resident // _PART)
            if self._tick - self._fitted < pause:
                return
            self._fitted = self._tick
            self._fit = self._factors.fit(self._seen())
        if next(self._fit, self) is self:
            self._fit = None
            self.revision += 1

    def _seen(self) -> Iterator[tuple[int, Seen]]:
        for number in list(self._cells):
            found = self._cells[number]
            if found.empty:
                del self._cells[number]
            else:
                yield number, found.take(number, self._tick, self._window)


def _add(counts: dict[int, int], key: int, more: int) -> None:
    count = counts.get(key, 0) + more
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)


def _visit(candidate: Candidate) -> Visit:
    if candidate.visit is None:
        raise ValueError(f"chunk {candidate.key.hex()} did not enter by this policy's `enter`")
    return candidate.visit


def _place(candidate: Candidate) -> int:
    # No call: this is asked several times of each chunk of a long prompt.
    uses = candidate.hits - 1
    return 2 * (uses if uses < 3 else 3) + candidate.continued
