"""Routing policies: one module each behind `choice.Policy`; `policy` is the one place that lists them."""

from __future__ import annotations

from kvist_router.mind.choice import Policy
from kvist_router.mind.policies.kvist import KvistPolicy
from kvist_router.mind.policies.least_load import LeastLoadPolicy
from kvist_router.mind.policies.round_robin import RoundRobinPolicy


def policy(name: str) -> Policy:
    """The policy of a setting's name; the settings class has checked the name."""
    match name:
        case "kvist":
            return KvistPolicy()
        case "least-load":
            return LeastLoadPolicy()
        case "round-robin":
            return RoundRobinPolicy()
    raise ValueError(f"policy {name!r} is none of kvist, least-load, round-robin")
