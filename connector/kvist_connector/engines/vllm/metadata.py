"""What the two halves tell each other through the engine, once per step.

scheduler half -> workers   StepPlan: what to load before, and to store after, the forward pass
workers -> scheduler half   StepReport: what became of it, merged over ranks by the engine

Ranks may end a store in different steps (CUDA copies are asynchronous), so the merge
counts ranks per store; a store counts only when every rank has said that it filled its part.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvist_connector.transfer.plan import Piece


@dataclass(frozen=True)
class StepPlan(KVConnectorMetadata):
    """`epoch` is the arena's; slots of another one are not written."""

    step: int
    epoch: int = 0
    loads: tuple[Piece, ...] = ()
    stores: tuple[Piece, ...] = ()
    report: bool = False


@dataclass(frozen=True)
class StepReport(KVConnectorWorkerMetadata):
    """`filled` and `unfilled`: ticket -> ranks that say so. `failed_keys` of any rank."""

    step: int
    filled: Counter[int] = field(default_factory=Counter)
    unfilled: Counter[int] = field(default_factory=Counter)
    failed_keys: frozenset[bytes] = frozenset()
    load_seconds: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Both ranks' reports of one step as one."""
        if not isinstance(other, StepReport):
            raise TypeError(f"cannot merge a {type(other).__name__} into a StepReport")
        return StepReport(
            step=max(self.step, other.step),
            filled=self.filled + other.filled,
            unfilled=self.unfilled + other.unfilled,
            failed_keys=self.failed_keys | other.failed_keys,
            load_seconds=max(self.load_seconds, other.load_seconds),
        )
