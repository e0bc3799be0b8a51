"""What an engine says of its own prefix cache, from its metrics page. Pure; called by health.py."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """Tokens since the engine's start."""

    queries: float
    hits: float


def read_prefix_cache(metrics: str) -> PrefixCache | None:
    """None when the engine does not say; raises ValueError for what is no page of metrics."""
    sums = {_QUERIES: 0.0, _HITS: 0.0}
    # Only these lines: the whole page takes long to parse.
    lines = [line for line in metrics.splitlines() if line.startswith((_QUERIES, _HITS))]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return PrefixCache(sums[_QUERIES], sums[_HITS]) if lines else None
