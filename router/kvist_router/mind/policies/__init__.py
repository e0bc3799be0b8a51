"""Routing policies: one module each behind `choice.Policy`; `policy` is the one place that lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from kvist_router.mind.choice import Policy
from kvist_router.mind.policies.kvist import KvistPolicy
from kvist_router.mind.policies.least_load import LeastLoadPolicy
from kvist_router.mind.policies.prefix_affinity import PrefixAffinityPolicy
from kvist_router.mind.policies.round_robin import RoundRobinPolicy
from kvist_router.mind.policies.weights import PolicyWeights

POLICIES: Final[Mapping[str, Callable[[PolicyWeights], Policy]]] = MappingProxyType(
    {
        "kvist": lambda weights: KvistPolicy(weights=weights),
        "approximate": lambda weights: KvistPolicy(feeds=False, weights=weights),
        "least-load": lambda _: LeastLoadPolicy(),
        "prefix-affinity": lambda weights: PrefixAffinityPolicy(weights.bound),
        "round-robin": lambda _: RoundRobinPolicy(),
    }
)


def policy(name: str, weights: PolicyWeights | None = None) -> Policy:
    """The policy of a setting's name; the settings class has checked the name."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name](weights or PolicyWeights())
