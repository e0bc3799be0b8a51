"""The cost-aware default: seconds saved x chance of reuse / bytes, the chance learned while it runs.

Chunks are told apart by what is known of them and of the request that used them last: uses, length of
prompt and answer, how much of the prompt was new, whether their chain goes on. How often each kind is used
again at each age is learned (`factors.py`), and from it follows the worth of keeping a chunk of its age
(`rates.py`): its Gittins index, by which the best order to serve is known when each candidate lives by
itself (Gittins 1979; for caches "hit density", Beckmann et al., NSDI 2018).

Evicted chunks are remembered, so that a use that came too late counts as a use and not as an end. The time
that chunks spend unused is entered as it passes, so lives under way count for the ages that they have
reached. A chunk of a long prompt counts less than one of a short prompt, since all of a prompt are used
again together: the root of their number is about what so many say. Age counts uses and entries in the tier,
not time: a quiet night ages nothing. Until much is known the chance falls with age alike in all kinds,
which is the order of LRU.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvist_connector.eviction import rates
from kvist_connector.eviction.candidate import Candidate
from kvist_connector.eviction.factors import Factors, Learned
from kvist_connector.eviction.visit import PLACES, Visit, cell, place

_FEWEST_GHOSTS: Final = 64
_GHOSTS: Final = 3  # for each chunk in the tier
_STEPS: Final = 8  # queues to an octave of worth
_OCTAVES: Final = 256  # of worth, around 1
_LOOKS: Final = 8  # visits at most, in one call


@dataclass(frozen=True, slots=True)
class _Ghost:
    visit: Visit
    place: int
    tick: int
    hits: int


class CostAware:
    """Least chance of reuse for its weight leaves first. Memory: three ghosts a chunk, and a visit for each
    request that used any of them last.

    `learned`: what an earlier one knew.
    """

    def __init__(self, learned: Learned | None = None) -> None:
        self._factors = Factors(learned)
        self._ghosts: OrderedDict[bytes, _Ghost] = OrderedDict()
        self._looks: list[tuple[int, int, int, Visit]] = []  # tick, serial, bucket that ends then
        self._serial = 0
        self._resident = 0
        self._tick = 0

    def learned(self) -> Learned:
        """What was learned until now, for one that comes after."""
        return self._factors.learned()

    def enter(self, candidate: Candidate, parent: Candidate | None) -> None:
        """It continues its parent; and it may come back."""
        self._advance(candidate.tick)
        if parent is not None and not parent.continued:
            _live(_visit(parent), _place(parent), -1)
            parent.continued = True
            _live(_visit(parent), _place(parent), 1)
        self._resident += 1
        ghost = self._ghosts.pop(candidate.key, None)
        if ghost is not None:
            self._used(ghost.visit, ghost.place, candidate.tick - ghost.tick)
            candidate.hits = ghost.hits + 1
        self._join(candidate, parent, candidate.tick, candidate.hits - 1)

    def use(self, candidate: Candidate, parent: Candidate | None, tick: int) -> None:
        """One life ends with a use, the next begins."""
        self._advance(tick)
        self._used(_visit(candidate), _place(candidate), tick - candidate.tick)
        self._join(candidate, parent, tick, candidate.hits)

    def answer(self, candidate: Candidate, tokens: int | None) -> None:
        """It and the chunks before it are of another kind from their next age on."""
        visit = _visit(candidate)
        if tokens is not None:
            # What its chunks are worth at the age they have stays: others of them may be in queues.
            visit.tokens = tokens
            visit.code = visit.encode()
        elif visit.depth == candidate.depth + 1:
            visit.over = True

    def leave(self, candidate: Candidate, tick: int, evicted: bool) -> None:
        """It lives on as a ghost, or did not end by itself: then nothing is learned."""
        self._resident -= 1
        visit = _visit(candidate)
        if evicted:
            self._ghosts[candidate.key] = _Ghost(visit, _place(candidate), candidate.tick, candidate.hits)
        else:
            visit.closed = True
            _live(visit, _place(candidate), -1)
        while len(self._ghosts) > max(_GHOSTS * self._resident, _FEWEST_GHOSTS):
            _, ghost = self._ghosts.popitem(last=False)
            _live(ghost.visit, ghost.place, -1)

    def queue(self, candidate: Candidate, tick: int) -> int:
        """By worth, in steps."""
        visit, own = _visit(candidate), _place(candidate)
        stage = rates.stage(tick - candidate.tick)
        worth = visit.worth.get(stage * PLACES + own)
        if worth is None:
            values = self._factors.values(cell(visit.code, own))
            worth = math.log2(values[rates.bucket(tick - candidate.tick)])
            visit.worth[stage * PLACES + own] = worth
        if candidate.weight <= 0:
            return 0
        worth += math.log2(candidate.weight / max(candidate.size, 1))
        return max(0, min(2 * _STEPS * _OCTAVES, round(_STEPS * worth) + _STEPS * _OCTAVES))

    def moves(self, candidate: Candidate, tick: int) -> int:
        """With the next stage of its age."""
        return candidate.tick + rates.stage_ends(rates.stage(tick - candidate.tick))

    def worth(self, candidate: Candidate, queue: int) -> float:
        """Within a queue chunks do not differ."""
        return float(queue)

    def _join(self, candidate: Candidate, parent: Candidate | None, tick: int, uses: int) -> None:
        """Of a chunk that is used: the visit of the chunk before it, or a new one."""
        before = parent.visit if parent is not None else None
        if before is None or before is candidate.visit or before.closed or before.depth != candidate.depth:
            found = min(before.found, candidate.depth) if before else 0
            before = Visit(tick, candidate.depth, candidate.depth, found)
            self._look_at(before, 0)
        candidate.visit = before
        before.extend(uses)
        _live(before, place(uses, candidate.continued), 1)
        _recode(before)

    def _used(self, visit: Visit, own: int, age: int) -> None:
        """At that age, part of whose bucket the chunk has spent unused."""
        bucket = rates.bucket(age)
        _live(visit, own, -1)
        weight = _weight(visit)
        self._factors.observe(
            cell(visit.code, own), bucket, weight, weight * max(0.0, age - rates.EDGES[bucket])
        )

    def _advance(self, tick: int) -> None:
        self._tick = tick
        self._factors.step()
        for _ in range(_LOOKS):
            if not self._looks or self._looks[0][0] > tick:
                break
            _, _, bucket, visit = heapq.heappop(self._looks)
            self._look(visit, bucket)

    def _look(self, visit: Visit, bucket: int) -> None:
        """Those of its chunks that nobody has used have spent the bucket unused."""
        if not visit.lives:
            return
        weight = _weight(visit)
        for own, lives in visit.lives.items():
            spent = weight * lives * rates.WIDTHS[bucket]
            self._factors.observe(cell(visit.code, own), bucket, 0.0, spent)
        if bucket + 1 < rates.BUCKETS:
            self._look_at(visit, bucket + 1)

    def _look_at(self, visit: Visit, bucket: int) -> None:
        self._serial += 1
        heapq.heappush(self._looks, (visit.began + rates.LEAVES[bucket], self._serial, bucket, visit))
        if len(self._looks) > 2 * (self._resident + len(self._ghosts)) + _FEWEST_GHOSTS:
            self._looks = [look for look in self._looks if look[3].lives or look[3] is visit]
            heapq.heapify(self._looks)


def _weight(visit: Visit) -> float:
    return 1 / math.sqrt(max(1, visit.depth))


def _recode(visit: Visit) -> None:
    """After a change of the visit: its chunks are of another kind."""
    code = visit.encode()
    if code != visit.code:
        visit.code = code
        visit.worth.clear()


def _live(visit: Visit, own: int, more: int) -> None:
    count = visit.lives.get(own, 0) + more
    if count:
        visit.lives[own] = count
    else:
        visit.lives.pop(own, None)


def _visit(candidate: Candidate) -> Visit:
    if candidate.visit is None:
        raise ValueError(f"chunk {candidate.key.hex()} did not enter by this policy's `enter`")
    return candidate.visit


def _place(candidate: Candidate) -> int:
    # No call: this is asked several times of each chunk of a long prompt.
    uses = candidate.hits - 1
    return 2 * (uses if uses < 7 else 7) + candidate.continued
