"""How many cores this router has, and so how many relays unless it was told. Called by app.py."""

from __future__ import annotations

import math
import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
MOST_RELAYS = 8


def cores(limit_file: Path = CPU_MAX) -> int:
    """Cores that this process may use, by affinity and by the limit of its container, rounded up."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = limit_file.read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup of version 2, or `max`: no limit
        return allowed


def default_relays(count: int) -> int:
    """One core is the mind's; a mind cannot answer many more than MOST_RELAYS. On up to two: one process."""
    return min(count - 1, MOST_RELAYS) if count > 2 else 0
