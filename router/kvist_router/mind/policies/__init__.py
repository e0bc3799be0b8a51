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

POLICIES: Final[Mapping[str, Callable[[], Policy]]] = MappingProxyType(
    {
        "kvist": KvistPolicy,
        "approximate": lambda: KvistPolicy(feeds=False),
        "least-load": LeastLoadPolicy,
        "prefix-affinity": PrefixAffinityPolicy,
        "round-robin": RoundRobinPolicy,
    }
)


def policy(name: str) -> Policy:
    """The policy of a setting's name; the settings class has checked the name."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name]()
