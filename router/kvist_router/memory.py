"""Pauses of the garbage collector. Called by whoever has built a process that serves."""

from __future__ import annotations

import gc


def settle_memory() -> None:
    """What lives as long as the process is not worth scanning on every collection: pauses hit p99."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
