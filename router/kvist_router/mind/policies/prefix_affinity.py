"""`prefix-affinity`: prompts that begin alike go to one replica, as long as it is not too busy.

    order of replicas = by hash(prefix, name), descending
    chosen            = the first with requests < ceil(1.25 * (all requests + 1) / replicas)

Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018).
Blind to caches and prompt lengths; replicas that come or go move only their own share of the prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from random import Random

from kvist_router.mind.choice import Candidate, Choice
from kvist_router.mind.policies.least_load import fewest_requests
from kvist_router.mind.policies.weights import BOUND


class PrefixAffinityPolicy:
    """Stateless."""

    feeds = False

    def __init__(self, bound: float = BOUND) -> None:
        self._bound = bound

    def choose(self, candidates: Sequence[Candidate], random: Random, prefix: bytes = b"") -> Choice:
        """The first in the prefix' order that has room; a prompt without a whole chunk: where fewest are."""
        if not prefix:
            return fewest_requests(candidates, random)
        total = sum(candidate.outstanding_requests for candidate in candidates)
        bound = math.ceil(self._bound * (total + 1) / len(candidates))
        order = sorted(candidates, key=lambda item: _weight(prefix, item.name), reverse=True)
        chosen = next(item for item in order if item.outstanding_requests < bound)
        if chosen is order[0]:
            return Choice(chosen.name, "first in the order of the prefix")
        return Choice(chosen.name, f"{order[0].name}, first in the order of the prefix, is at its bound")


def _weight(prefix: bytes, name: str) -> bytes:
    return blake2b(name.encode(), key=prefix, digest_size=8).digest()
