"""What a model's name says about the size of its KV, before any engine has run. Pure.

The only facts at admission are texts: a count of parameters is part of most names. The bytes per token are
those of the leanest known model of about that count, so that a warning means too small in any case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvist_operator.spec import CacheCluster

_KIB: Final = 1024
_COUNT: Final = re.compile(r"(?<![A-Za-z0-9.])([0-9]{1,4}(?:\.[0-9]{1,3})?)([BbMm])(?![A-Za-z0-9])")
# Experts that are not always used, and latents in place of keys and values: the count says little.
_UNLIKE: Final = re.compile(r"(?<![A-Za-z0-9])(a[0-9.]+b|[0-9]+x[0-9.]+b|deepseek(?!.*distill)|kimi)", re.I)
# Fewer parameters than this, in 10^9 -> least bytes per token in 16 bits, over all ranks.
_LEAST: Final = (
    (1.0, 12 * _KIB),
    (3.0, 28 * _KIB),
    (7.0, 36 * _KIB),
    (14.0, 56 * _KIB),
    (30.0, 48 * _KIB),
    (100.0, 120 * _KIB),
    (float("inf"), 72 * _KIB),
)


@dataclass(frozen=True)
class Size:
    """Of a model: parameters, and at least how many bytes of KV a token takes."""

    parameters: float
    kv_bytes_per_token: int


def estimate(cluster: CacheCluster) -> Size | None:
    """None when the name does not say."""
    name = cluster.spec.model.name.rstrip("/").rpartition("/")[2]
    found = _COUNT.search(name)
    if found is None or _UNLIKE.search(name):
        return None
    billions = float(found[1]) / (1 if found[2] in "Bb" else 1000)
    least = next(size for limit, size in _LEAST if billions < limit)
    return Size(billions * 1e9, int(least * _width(cluster)))


def _width(cluster: CacheCluster) -> float:
    """Of a number in the KV cache, relative to 16 bits."""
    engine = cluster.spec.engine
    if any(item.replace("_", "-").startswith("--kv-cache-dtype") for item in engine.extra_args):
        return 0.5
    return 2.0 if engine.dtype == "float32" else 1.0
