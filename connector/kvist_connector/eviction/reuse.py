"""The cost-aware default: seconds saved x chance of reuse / bytes, the chance learned while it runs.

Chunks are sorted into classes by what is known of them: uses, turn of their conversation, whether
their chain goes on. For every class two histograms say after which ages a chunk was used again, and after
which it never was. From them follows, for a chunk of an age, the most uses per unit of time that
keeping it for any further time yields: the Gittins index, by which the best order to serve is known when
each candidate lives by itself (Gittins 1979; for caches "hit density", Beckmann et al., NSDI 2018).

Evicted chunks are remembered, as many as there are in the tier, so that a use that came too late counts
as a use and not as an end. Age counts uses and entries in the tier, not time: a quiet night ages nothing.
Until much is known the chance falls with age alike in all classes, which is the order of LRU.
"""

from __future__ import annotations

import math
from collections import OrderedDict
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
_REFRESHES: Final = 8  # of the values, while as many lives end as the tier has chunks
_NOBODY: Final = 1e-9  # share of lives that are still waited for
_HALVINGS: Final = 64  # refreshes after which what was learned counts half
_OCTAVES: Final = 128  # of seconds / byte, around 1


@dataclass(slots=True)
class _Class:
    """What chunks of one kind did, by bucket of age."""

    uses: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    ends: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    value: list[float] = field(default_factory=lambda: [_SHAPE / edge for edge in _EDGES[:-1]])

    def refresh(self, keep: float) -> None:
        """Values from what was learned, which counts `keep` from now on."""
        self.value = _best_rates(self._rates())
        self.uses = [keep * count for count in self.uses]
        self.ends = [keep * count for count in self.ends]

    def _rates(self) -> list[float]:
        """Uses per unit of time in each bucket: those seen, over the time that chunks spent in it."""
        rates = [0.0] * _BUCKETS
        later = 0.0
        for bucket in range(_BUCKETS - 1, -1, -1):
            low, high = _EDGES[bucket], _EDGES[bucket + 1]
            inside = self.uses[bucket] + self.ends[bucket]
            spent = (high - low) * (later + inside / 2)
            rates[bucket] = (self.uses[bucket] + _PRIOR) / (spent + _PRIOR * (low + high) / 2 / _SHAPE)
            later += inside
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
    """Least chance of reuse for its weight leaves first. Memory: one ghost a chunk, 50 classes at most."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._ghosts: OrderedDict[bytes, _Ghost] = OrderedDict()
        self._resident = 0
        self._ended = 0  # lives since the last refresh
        self._refreshed = 0
        self._stale: list[_Class] = []  # to be refreshed, one at a time so that no call takes long
        self.revision = 0

    def enter(self, candidate: Candidate, parent: Candidate | None) -> None:
        """It continues its parent; and it may come back."""
        if parent is not None:
            parent.continued = True
            candidate.turn = min(parent.turn + (parent.hits > 1), _TURNS)
        self._resident += 1
        ghost = self._ghosts.pop(candidate.key, None)
        if ghost is not None:
            self._learn(ghost.kind, candidate.tick - ghost.tick, True)
            candidate.hits, candidate.turn = ghost.hits + 1, ghost.turn

    def use(self, candidate: Candidate, tick: int) -> None:
        """One life ends with a use, the next begins."""
        self._learn(_kind(candidate), tick - candidate.tick, True)

    def leave(self, candidate: Candidate, tick: int, evicted: bool) -> None:
        """It lives on as a ghost, or did not end by itself: then nothing is learned."""
        self._resident -= 1
        if evicted:
            self._ghosts[candidate.key] = _Ghost(
                _kind(candidate), candidate.tick, candidate.hits, candidate.turn
            )
        while len(self._ghosts) > max(self._resident, _FEWEST_GHOSTS):
            _, ghost = self._ghosts.popitem(last=False)
            self._learn(ghost.kind, tick - ghost.tick, False)

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

    def _learn(self, kind: int, age: int, used: bool) -> None:
        found = self._classes.setdefault(kind, _Class())
        (found.uses if used else found.ends)[_bucket(age)] += 1
        self._ended += 1
        if self._ended > self._resident / _REFRESHES + 256:
            self._ended = 0
            self._refreshed += 1
            self._stale = list(self._classes.values())
        if self._stale:
            self._stale.pop().refresh(0.5 if self._refreshed % _HALVINGS == 0 else 1.0)
            self.revision += 1


def _kind(candidate: Candidate) -> int:
    return (min(candidate.hits, _HITS) * (_TURNS + 1) + min(candidate.turn, _TURNS)) * 2 + candidate.continued


def _bucket(age: int) -> int:
    return min(int(_PER_OCTAVE * math.log2(age)), _BUCKETS - 1) if age > 1 else 0
