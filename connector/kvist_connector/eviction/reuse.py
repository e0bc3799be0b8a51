"""The cost-aware default: seconds saved x chance of reuse / bytes, the chance learned while it runs.

Chunks are sorted into classes by what is known of them: uses, turn of their conversation, whether
their chain goes on. For every class two histograms say after which ages a chunk was used again, and after
which it never was. From them follows, for a chunk of an age, the most uses per unit of time that
keeping it for any further time yields: the Gittins index, by which the best order to serve is known when
each candidate lives by itself (Gittins 1979; for caches "hit density", Beckmann et al., NSDI 2018).

Evicted chunks are remembered, twice as many as there are in the tier, so that a use that came too late
counts as a use and not as an end. Those whose life goes on count for the ages that they have reached, as
censored observations do (Kaplan and Meier 1958): without them a large tier would know only of what was
used again quickly.
Age counts uses and entries in the tier, not time: a quiet night ages nothing.
Until much is known the chance falls with age alike in all classes, which is the order of LRU.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kvist_connector.eviction.candidate import NEVER, Candidate

_HITS: Final = 3  # of more uses nothing further is learned
_TURNS: Final = 3
_PER_OCTAVE: Final = 2  # buckets of age
_BUCKETS: Final = 56
_EDGES: Final = tuple(2 ** (bucket / _PER_OCTAVE) for bucket in range(_BUCKETS + 1))
_LEAVES: Final = tuple(math.ceil(edge) for edge in _EDGES[1:])  # first age beyond each
_PRIOR: Final = 5.0  # uses that a class is taken to have had before any was seen, in each bucket,
_SHAPE: Final = 0.3  # at a rate of this / age
_FEWEST_GHOSTS: Final = 64
_GHOSTS: Final = 2  # for each chunk in the tier
_WINDOWS: Final = 512  # at most twice as many tell when the lives under way began
_REFRESHES: Final = 8  # of the values, while as many lives end as the tier has chunks
_NOBODY: Final = 1e-9  # share of lives that are still waited for
_HALVINGS: Final = 64  # refreshes after which what was learned counts half
_OCTAVES: Final = 128  # of seconds / byte, around 1


@dataclass(slots=True)
class _Class:
    """What chunks of one kind did, by bucket of age, and since when others live."""

    uses: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    ends: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    begun: Counter[int] = field(default_factory=Counter)  # lives under way, by window of their first tick
    value: list[float] = field(default_factory=lambda: [_SHAPE / edge for edge in _EDGES[:-1]])

    def refresh(self, keep: float, ages: Iterable[tuple[int, int]]) -> None:
        """Values from what was learned, which counts `keep` from now on; ages of lives, how many each."""
        self.value = _best_rates(self._rates(ages))
        self.uses = [keep * count for count in self.uses]
        self.ends = [keep * count for count in self.ends]

    def ages(self, tick: int, window: int) -> Iterator[tuple[int, int]]:
        """Of lives under way, to half a window."""
        for number, lives in self.begun.items():
            yield max(1, tick - number * window - window // 2), lives

    def _rates(self, ages: Iterable[tuple[int, int]]) -> list[float]:
        """Uses per unit of time in each bucket: those seen, over the time that chunks spent in it."""
        living, lived = [0.0] * _BUCKETS, [0.0] * _BUCKETS
        for age, lives in ages:
            bucket = _bucket(age)
            living[bucket] += lives
            lived[bucket] += lives * (age - _EDGES[bucket])
        rates = [0.0] * _BUCKETS
        later = 0.0
        for bucket in range(_BUCKETS - 1, -1, -1):
            low, high = _EDGES[bucket], _EDGES[bucket + 1]
            inside = self.uses[bucket] + self.ends[bucket]
            spent = (high - low) * (later + inside / 2) + lived[bucket]
            rates[bucket] = (self.uses[bucket] + _PRIOR) / (spent + _PRIOR * (low + high) / 2 / _SHAPE)
            later += inside + living[bucket]
        return rates


def _best_rates(rates: list[float]) -> list[float]:
    """Most expected uses per expected time, over all ages up to which to wait from the middle of a bucket."""
    whole = [
        -math.expm1(-rate * (high - low)) for rate, low, high in zip(rates, _EDGES, _EDGES[1:], strict=False)
    ]
    return [_best_rate(rates, whole, bucket) for bucket in range(_BUCKETS)]


def _best_rate(rates: list[float], whole: list[float], bucket: int) -> float:
    used = -math.expm1(-rates[bucket] * (_EDGES[bucket + 1] - _EDGES[bucket]) / 2)
    uses, time, waiting = used, used / rates[bucket], 1 - used
    best = uses / time
    for rate, used in zip(rates[bucket + 1 :], whole[bucket + 1 :], strict=True):
        uses += waiting * used
        time += waiting * used / rate
        waiting *= 1 - used
        if waiting < _NOBODY:
            break
        if uses > best * time:
            best = uses / time
    return best


@dataclass(frozen=True, slots=True)
class _Ghost:
    kind: int
    tick: int
    hits: int
    turn: int


class CostAware:
    """Least chance of reuse for its weight leaves first. Memory: two ghosts a chunk, 50 classes at most."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._ghosts: OrderedDict[bytes, _Ghost] = OrderedDict()
        self._resident = 0
        self._tick = 0
        self._window = 64  # ticks
        self._ended = 0  # lives since the last refresh
        self._refreshed = 0
        self._stale: list[_Class] = []  # to be refreshed, one at a time so that no call takes long
        self.revision = 0

    def enter(self, candidate: Candidate, parent: Candidate | None) -> None:
        """It continues its parent; and it may come back."""
        self._advance(candidate.tick)
        if parent is not None:
            if not parent.continued:
                self._over(_kind(parent), parent.tick)
                parent.continued = True
                self._begin(_kind(parent), parent.tick)
            candidate.turn = min(parent.turn + (parent.hits > 1), _TURNS)
        self._resident += 1
        ghost = self._ghosts.pop(candidate.key, None)
        if ghost is not None:
            self._learn(self._over(ghost.kind, ghost.tick).uses, candidate.tick - ghost.tick)
            candidate.hits, candidate.turn = ghost.hits + 1, ghost.turn
        self._begin(_kind(candidate), candidate.tick)

    def use(self, candidate: Candidate, tick: int) -> None:
        """One life ends with a use, the next begins."""
        self._advance(tick)
        kind = _kind(candidate)
        found = self._over(kind, candidate.tick)
        self._learn(found.uses, tick - candidate.tick)
        if candidate.hits < _HITS:
            found = self._class(_kind(candidate, 1))
        found.begun[tick // self._window] += 1

    def leave(self, candidate: Candidate, tick: int, evicted: bool) -> None:
        """It lives on as a ghost, or did not end by itself: then nothing is learned."""
        self._resident -= 1
        kind = _kind(candidate)
        if evicted:
            self._ghosts[candidate.key] = _Ghost(kind, candidate.tick, candidate.hits, candidate.turn)
        else:
            self._over(kind, candidate.tick)
        while len(self._ghosts) > max(_GHOSTS * self._resident, _FEWEST_GHOSTS):
            _, ghost = self._ghosts.popitem(last=False)
            self._learn(self._over(ghost.kind, ghost.tick).ends, tick - ghost.tick)

    def queue(self, candidate: Candidate, tick: int) -> int:
        """By class, age and octave of seconds a byte."""
        octave = (
            math.frexp(candidate.weight / max(candidate.size, 1))[1] if candidate.weight > 0 else -_OCTAVES
        )
        place = max(0, min(octave + _OCTAVES, 2 * _OCTAVES - 1))
        return (_kind(candidate) * _BUCKETS + _bucket(tick - candidate.tick)) * 2 * _OCTAVES + place

    def moves(self, candidate: Candidate, queue: int) -> int:
        """With the next bucket of age."""
        bucket = queue // (2 * _OCTAVES) % _BUCKETS
        return candidate.tick + _LEAVES[bucket] if bucket < _BUCKETS - 1 else NEVER

    def worth(self, candidate: Candidate, queue: int) -> float:
        """As `rank`: within a queue chunks do not differ."""
        return self.rank(queue)

    def rank(self, queue: int) -> float:
        """Seconds saved per byte and unit of time; within an octave chunks differ by class and age only."""
        rest, place = divmod(queue, 2 * _OCTAVES)
        kind, bucket = divmod(rest, _BUCKETS)
        found = self._classes.get(kind)
        value = found.value[bucket] if found is not None else _SHAPE / _EDGES[bucket]
        return math.ldexp(value, place - _OCTAVES)

    def _advance(self, tick: int) -> None:
        self._tick = tick
        if tick // self._window >= _WINDOWS:
            self._window *= 2
            for found in self._classes.values():
                halved: Counter[int] = Counter()
                for number, lives in found.begun.items():
                    halved[number // 2] += lives
                found.begun = halved

    def _begin(self, kind: int, tick: int) -> None:
        self._class(kind).begun[tick // self._window] += 1

    def _over(self, kind: int, tick: int) -> _Class:
        """A life that began at `tick` ends."""
        found = self._class(kind)
        number = tick // self._window
        left = found.begun[number] - 1
        if left:
            found.begun[number] = left
        else:
            del found.begun[number]
        return found

    def _learn(self, seen: list[float], age: int) -> None:
        seen[_bucket(age)] += 1
        self._ended += 1
        if self._ended > self._resident / _REFRESHES + 256:
            self._ended = 0
            self._refreshed += 1
            self._stale = list(self._classes.values())
        if self._stale:
            stale = self._stale.pop()
            keep = 0.5 if self._refreshed % _HALVINGS == 0 else 1.0
            stale.refresh(keep, stale.ages(self._tick, self._window))
            self.revision += 1

    def _class(self, kind: int) -> _Class:
        found = self._classes.get(kind)
        if found is None:
            found = self._classes[kind] = _Class()
        return found


def _kind(candidate: Candidate, more: int = 0) -> int:
    """`more`: uses beyond those in its books."""
    hits = candidate.hits + more
    # No calls: this is asked several times of each chunk of a long prompt.
    return ((hits if hits < _HITS else _HITS) * (_TURNS + 1) + candidate.turn) * 2 + candidate.continued


def _bucket(age: int) -> int:
    return min(int(_PER_OCTAVE * math.log2(age)), _BUCKETS - 1) if age > 1 else 0
