"""Policies that choose beside the one that is followed, on the same live requests. Called by mind/mind.py.

What a shadow would have done is only predicted; what happened is measured. For requests that it would have
sent elsewhere both are summed up, so that the difference is the regret of not following it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from random import Random

from kvist_router.metrics import MindMetrics
from kvist_router.mind.choice import Candidate, Policy
from kvist_router.mind.inflight import Elsewhere

Candidates = Sequence[Candidate]


class Shadows:
    """`policies` by name; none in most routers."""

    def __init__(self, policies: Mapping[str, Policy], metrics: MindMetrics | None) -> None:
        self._policies, self._metrics = dict(policies), metrics

    def __bool__(self) -> bool:
        return bool(self._policies)

    def choose(
        self,
        chosen: str,
        candidates: Callable[[bool], Candidates],
        followed: bool,
        random: Random,
        prefix: bytes,
        unheard: int,
    ) -> dict[str, Elsewhere]:
        """What those say who disagree with `chosen`.

        `candidates(feeds)` prices the replicas. What a choice would have cost is judged with `followed`, as
        the followed policy sees them.
        """
        found: dict[str, Elsewhere] = {}
        for name, policy in self._policies.items():
            choice = policy.choose(candidates(policy.feeds), random, prefix, unheard)
            if self._metrics is not None:
                self._metrics.shadow_choice(name, choice.name == chosen)
            if choice.name != chosen:
                judged = next(item for item in candidates(followed) if item.name == choice.name)
                found[name] = Elsewhere(choice.name, judged.cost.total)
        return found

    def dry_run(self) -> Shadows:
        """A copy that counts nothing."""
        return Shadows({name: dry_run(policy) for name, policy in self._policies.items()}, None)


def dry_run(policy: Policy) -> Policy:
    """A copy whose choices leave the policy as it is."""
    return deepcopy(policy)
