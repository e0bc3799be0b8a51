"""`prefix-affinity`: prompts that begin alike go to one replica, as long as it is not too busy.

    order of replicas = by hash(prefix, name), descending
    chosen            = the first with requests < ceil(1.25 * (all requests + 1) / replicas)

Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018).
Blind to caches and prompt lengths; replicas that come or go move only their own share of the prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

    def choose(
        self, candidates: Sequence[Candidate], random: Random, prefix: bytes = b"", unheard: int = 0
    ) -> Choice:
        """The first in the prefix' order that has room; a prompt without a whole chunk: where fewest are."""
        if not prefix:
            return fewest_requests(candidates, random)
        requests = {candidate.name: candidate.outstanding_requests for candidate in candidates}
        first, chosen = by_hash(prefix, requests, self._bound)
        if chosen == first:
            return Choice(chosen, "first in the order of the prefix")
        return Choice(chosen, f"{first}, first in the order of the prefix, is at its bound")


def by_hash(prefix: bytes, requests: Mapping[str, int], bound: float = BOUND) -> tuple[str, str]:
    """The first in the prefix' order, and the first below its bound; `requests` in flight by replica."""
    most = math.ceil(bound * (sum(requests.values()) + 1) / len(requests))
    order = sorted(requests, key=lambda name: _weight(prefix, name), reverse=True)
    return order[0], next(name for name in order if requests[name] < most)


def _weight(prefix: bytes, name: str) -> bytes:
    return blake2b(name.encode(), key=prefix, digest_size=8).digest()
