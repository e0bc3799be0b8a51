"""What leaves a full tier first. Torch-free, no clock, no I/O but of traces; for agents and sizing tools."""

from __future__ import annotations

from typing import Literal

from kvist_connector.eviction.candidate import Candidate, Policy
from kvist_connector.eviction.factors import Learned
from kvist_connector.eviction.index import EvictionIndex
from kvist_connector.eviction.lru import Lru
from kvist_connector.eviction.reuse import CostAware
from kvist_connector.eviction.simulate import Hits, optimum, replay
from kvist_connector.eviction.trace import Trace, read_trace, trace_of

__all__ = [
    "Candidate",
    "CostAware",
    "EvictionIndex",
    "Hits",
    "Learned",
    "Lru",
    "Policy",
    "Trace",
    "optimum",
    "policy",
    "read_trace",
    "replay",
    "trace_of",
]


def policy(name: Literal["lru", "cost"], learned: Learned | None = None) -> Policy:
    """A policy by its name in the settings; it goes on from what an earlier one learned."""
    return Lru() if name == "lru" else CostAware(learned)
