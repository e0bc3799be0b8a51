"""Amounts: what plan and rendering read of `resources`, and sizes as remedies name them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Amount = str | int | float
_MEBIBYTE: Final = 1024**2


def cpu_cores(amount: Amount) -> float:
    """Cores of "500m", "4", 4 or 0.5; 0 for what is no amount of CPU."""
    text = str(amount).strip()
    number, divisor = (text[:-1], 1000) if text.endswith("m") else (text, 1)
    try:
        return max(0.0, float(number) / divisor)
    except ValueError:
        return 0.0


def gpu_resource(amounts: Mapping[str, Amount]) -> str | None:
    """The resource's name, such as nvidia.com/gpu, if one is asked for."""
    return next((name for name in sorted(amounts) if name.rpartition("/")[2] == "gpu"), None)


def round_up(size: int) -> int:
    """Bytes, to whole mebibytes: what a person would write."""
    return -(-size // _MEBIBYTE) * _MEBIBYTE


def round_down(size: int) -> int:
    """Bytes, to whole mebibytes."""
    return size // _MEBIBYTE * _MEBIBYTE
