"""Figures of tenants: those that the settings name are label values, `other` is the rest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvist_connector import names

OTHER: Final = "other"
KINDS: Final = ("prompt", "answer")
REASONS: Final = ("requests", "tokens", "full", "late", "ttft")
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class _Series(NamedTuple):
    """Of one tenant."""

    requests: Counter
    prompt: Counter
    answer: Counter


class AdmissionMetrics:
    """What was let through, made to wait and refused."""

    def __init__(self, registry: CollectorRegistry) -> None:
        tenant = names.LABEL_TENANT
        self._named: set[str] = set()
        # Finding a labelled series costs more than counting in it.
        self._series: dict[str, _Series] = {}
        self._requests = Counter(
            "kvist_router_tenant_requests_total", "Requests that had their turn.", [tenant], registry=registry
        )
        self._tokens = Counter(
            "kvist_router_tenant_tokens_total",
            "Tokens of prompts, and of answers where they are told or streamed one by one.",
            [tenant, "kind"],
            registry=registry,
        )
        self._refused = Counter(
            "kvist_router_limited_total",
            "Requests refused: rate of requests or tokens, queue full, waited too long, TTFT too long.",
            [tenant, names.LABEL_REASON],
            registry=registry,
        )
        self._waiting = Gauge(
            "kvist_router_queued_requests", "Requests that wait for their turn.", registry=registry
        )
        self._wait = 0
        self.waited = Histogram(
            "kvist_router_queue_seconds", "Time that they waited.", buckets=_SECONDS, registry=registry
        )

    def keep(self, named: Collection[str]) -> None:
        """The tenants with series of their own; those of others are dropped."""
        for gone in self._named.difference(named):
            self._series.pop(gone, None)
            self._requests.remove(gone)
            for kind in KINDS:
                self._tokens.remove(gone, kind)
            for reason in REASONS:
                self._refused.remove(gone, reason)
        self._named = set(named)

    def wait(self, count: int) -> None:
        """So many wait now; said after every request, and the same nearly always."""
        if count != self._wait:
            self._wait = count
            self._waiting.set(count)

    def request(self, tenant: str, tokens: int) -> None:
        """One had its turn, with a prompt of so many tokens."""
        series = self._of(tenant)
        series.requests.inc()
        series.prompt.inc(tokens)

    def answered(self, tenant: str, tokens: int) -> None:
        """One has ended."""
        self._of(tenant).answer.inc(tokens)

    def refused(self, tenant: str, reason: str) -> None:
        """`reason` is one of REASONS."""
        self._refused.labels(self.label(tenant), reason).inc()

    def _of(self, tenant: str) -> _Series:
        label = self.label(tenant)
        series = self._series.get(label)
        if series is None:
            requests, tokens = self._requests.labels(label), self._tokens
            series = _Series(requests, *(tokens.labels(label, kind) for kind in KINDS))
            self._series[label] = series
        return series

    def label(self, tenant: str) -> str:
        """A tenant's label value."""
        return tenant if tenant in self._named else OTHER
