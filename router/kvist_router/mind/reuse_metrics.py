"""What was reused, with three denominators: requests, tokens, prefill seconds. Called by mind/outcome.py.

By model, tenant and replica. Tenants that the settings name are label values, `other` is the rest; the series
of a replica end with it.
"""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter

from kvist_connector import names
from kvist_connector.protocol.engine import RequestRecord
from kvist_connector.protocol.tiers import Tier


class Whose(NamedTuple):
    """Label values."""

    model: str
    tenant: str
    replica: str


class _Series(NamedTuple):
    """Of one model, tenant and replica."""

    requests: Counter
    hits: Counter
    prompt: Counter
    prefill: Counter
    saved: Counter


class ReuseMetrics:
    """Requests of this router whose engine reported what it reused."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Finding a labelled series costs more than counting in it.
        self._series: dict[Whose, _Series] = {}
        self._counters = _Series(
            Counter(
                "kvist_router_recorded_requests_total",
                "Requests whose engine reported what it reused.",
                [names.LABEL_MODEL, names.LABEL_TENANT, names.LABEL_REPLICA],
                registry=registry,
            ),
            Counter(
                "kvist_router_hit_requests_total",
                "Of those, requests that reused at least one chunk.",
                [names.LABEL_MODEL, names.LABEL_TENANT, names.LABEL_REPLICA],
                registry=registry,
            ),
            Counter(
                "kvist_router_recorded_prompt_tokens_total",
                "Prompt tokens of those requests.",
                [names.LABEL_MODEL, names.LABEL_TENANT, names.LABEL_REPLICA],
                registry=registry,
            ),
            Counter(
                "kvist_router_prefill_seconds_total",
                "Estimated: prefill of those prompts without any reuse, once an engine's speed is measured.",
                [names.LABEL_MODEL, names.LABEL_TENANT, names.LABEL_REPLICA],
                registry=registry,
            ),
            Counter(
                "kvist_router_saved_seconds_total",
                "Estimated: recompute minus load time of reused tokens, once an engine's speed is measured.",
                [names.LABEL_MODEL, names.LABEL_TENANT, names.LABEL_REPLICA],
                registry=registry,
            ),
        )
        self._tokens = Counter(
            "kvist_router_hit_tokens_total",
            "Tokens reused, by tier.",
            [names.LABEL_MODEL, names.LABEL_TENANT, names.LABEL_REPLICA, names.LABEL_TIER],
            registry=registry,
        )
        self._bytes = Counter(
            "kvist_router_hit_bytes_total",
            "KV of those tokens, by tier.",
            [names.LABEL_MODEL, names.LABEL_TENANT, names.LABEL_REPLICA, names.LABEL_TIER],
            registry=registry,
        )

    def count(self, whose: Whose, record: RequestRecord, hit: bool, token_bytes: float) -> None:
        """A request; `hit`: it reused at least a chunk. `token_bytes`: KV of a token, 0 when not known."""
        series = self._of(whose)
        series.requests.inc()
        series.prompt.inc(record.prompt_tokens)
        if hit:
            series.hits.inc()
        for tier in Tier:
            tokens = max(0, record.hit_tokens.get(tier, 0))
            if tokens:
                self._tokens.labels(*whose, tier.label).inc(tokens)
                self._bytes.labels(*whose, tier.label).inc(tokens * token_bytes)

    def seconds(self, whose: Whose, whole: float, saved: float) -> None:
        """Its prefill without any reuse, and what of that was saved."""
        series = self._of(whose)
        series.prefill.inc(whole)
        series.saved.inc(max(0.0, saved))

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        for whose in [item for item in self._series if item.replica == replica]:
            del self._series[whose]
            for counter in self._counters:
                counter.remove(*whose)
            for tier in Tier:
                self._tokens.remove(*whose, tier.label)
                self._bytes.remove(*whose, tier.label)

    def _of(self, whose: Whose) -> _Series:
        series = self._series.get(whose)
        if series is None:
            series = self._series[whose] = _Series(*(item.labels(*whose) for item in self._counters))
        return series
