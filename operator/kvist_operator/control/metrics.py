"""Metrics of the operator, in a registry of their own. Label values are bounded."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvist_operator.control.counted import Call

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """What the operator does, and what it costs the API server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reconciles = Counter(
            "kvist_operator_reconciles_total",
            "Reconciliations by result: done, failed, left, crashed.",
            ["result"],
            registry=registry,
        )
        self._seconds = Histogram(
            "kvist_operator_reconcile_seconds",
            "Time of one reconciliation.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._calls = Counter(
            "kvist_operator_api_calls_total",
            "Calls of the API server.",
            ["verb", "resource"],
            registry=registry,
        )
        self._leading = Gauge(
            "kvist_operator_leading", "1 while this operator holds the lease.", registry=registry
        )
        self._queue = Gauge(
            "kvist_operator_queue_length", "Clusters that wait to be reconciled.", registry=registry
        )
        self._clusters = Gauge("kvist_operator_clusters", "CacheClusters known.", registry=registry)
        self._unlisted = Gauge(
            "kvist_operator_unlisted_namespaces",
            "Namespaces that the acting operator could not list at its last sweep: gone, or without rights.",
            registry=registry,
        )
        self._failures = Counter(
            "kvist_operator_task_failures_total",
            "Background tasks that were started again after an error.",
            ["task"],
            registry=registry,
        )

    def reconciled(self, result: str, seconds: float) -> None:
        """One turn ended."""
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def called(self, call: Call) -> None:
        """One call of the API server is made."""
        self._calls.labels(call[0], call[2]).inc()

    def task_failed(self, name: str) -> None:
        """A background task has to be started again."""
        self._failures.labels(name).inc()

    def watch(
        self, leading: Callable[[], float], waiting: Callable[[], float], known: Callable[[], float]
    ) -> None:
        """Where gauges are read from at scrape time."""
        self._leading.set_function(leading)
        self._queue.set_function(waiting)
        self._clusters.set_function(known)

    def watch_sweep(self, unlisted: Callable[[], float]) -> None:
        """Where the sweep's gauge is read from at scrape time."""
        self._unlisted.set_function(unlisted)
