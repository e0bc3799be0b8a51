"""Metrics of the router, in a registry of their own. Names follow Prometheus' rules: unit last, `_total`.

`RelayMetrics` is written by the relay, `MindMetrics` by the mind: they may be two processes.
Label values are bounded: replica names, reasons from a closed list, outcomes.
"""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvist_connector import names
from kvist_router.mind.admission.metrics import AdmissionMetrics
from kvist_router.mind.reuse_metrics import ReuseMetrics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DECISION_SECONDS = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
_CACHE = "cache"  # cold or warm: whether part of the prompt was predicted to be reused


class RelayMetrics:
    """What clients see."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvist_router_requests_total", "Requests by end.", [names.LABEL_OUTCOME], registry=registry
        )
        self.in_flight = Gauge("kvist_router_in_flight_requests", "Requests being served.", registry=registry)
        self.retries = Counter(
            "kvist_router_retries_total", "Requests sent to a second replica.", registry=registry
        )
        self.continuations = Counter(
            "kvist_router_continuations_total",
            "Streamed answers whose engine died, and what became of them: continued, refused.",
            [names.LABEL_OUTCOME],
            registry=registry,
        )
        self.upstream_errors = Counter(
            "kvist_router_upstream_errors_total",
            "Attempts that failed at an engine.",
            [names.LABEL_REPLICA],
            registry=registry,
        )
        self.unauthorized = Counter(
            "kvist_router_unauthorized_total",
            "Requests without a valid API key.",
            registry=registry,
        )
        self.without_mind = Counter(
            "kvist_router_without_mind_total",
            "Requests sent to a replica by hash, since the mind's process was gone.",
            registry=registry,
        )
        self._failing: set[str] = set()
        self.ttft = Histogram(
            "kvist_router_ttft_seconds",
            "Request received to first upstream body byte, streaming requests.",
            [_CACHE],
            buckets=_SECONDS,
            registry=registry,
        )
        self.itl = Histogram(
            "kvist_router_itl_seconds",
            "Mean pause between the pieces of one streamed answer.",
            [_CACHE],
            buckets=_SECONDS,
            registry=registry,
        )

    def upstream_error(self, replica: str) -> None:
        """Count an attempt that failed."""
        self._failing.add(replica)
        self.upstream_errors.labels(replica).inc()

    def keep(self, replicas: Collection[str]) -> None:
        """Drop the series of all others, also of one whose last requests failed after its removal."""
        for gone in self._failing.difference(replicas):
            self._failing.discard(gone)
            self.upstream_errors.remove(gone)


class TaskMetrics:
    """Background tasks of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.task_failures = Counter(
            "kvist_router_task_failures_total",
            "Background tasks restarted after an error.",
            ["task"],
            registry=registry,
        )


class MindMetrics:
    """What decisions were and what came of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.admission = AdmissionMetrics(registry)
        replica = [names.LABEL_REPLICA]
        self.decision = Histogram(
            "kvist_router_decision_seconds",
            "Body to decision: parse, render, tokenize, keys, lookup, choice.",
            buckets=_DECISION_SECONDS,
            registry=registry,
        )
        self.decisions = Counter(
            "kvist_router_decisions_total", "Requests sent to a replica.", replica, registry=registry
        )
        self.waiting = Gauge(
            "kvist_router_waiting_requests", "Requests that wait for a replica.", registry=registry
        )
        self.refusals = Counter(
            "kvist_router_refusals_total",
            "Requests refused before an engine saw them.",
            ["status"],
            registry=registry,
        )
        self._remote = Counter(
            "kvist_router_remote_tokenize_total",
            "Prompts tokenized by an engine, since local tokens are not exact.",
            [names.LABEL_REASON],
            registry=registry,
        )
        self.predicted = Counter(
            "kvist_router_predicted_tokens_total", "Prompt tokens predicted to be reused.", registry=registry
        )
        self.prompt = Counter("kvist_router_prompt_tokens_total", "Prompt tokens sent.", registry=registry)
        self.reuse = ReuseMetrics(registry)
        self.mismatches = Counter(
            "kvist_router_token_mismatches_total",
            "Requests whose tokens the engine saw differently than the router.",
            registry=registry,
        )
        self.healthy = Gauge(
            "kvist_router_replica_healthy", "1 when requests may go there.", replica, registry=registry
        )
        self.feed = Gauge(
            "kvist_router_feed_live", "1 when the replica's feed is connected.", replica, registry=registry
        )
        self.breaker = Gauge(
            "kvist_router_breaker_open",
            "1 when requests to the replica failed in a row and others are preferred.",
            replica,
            registry=registry,
        )
        self.feed_breaks = Counter(
            "kvist_router_feed_breaks_total", "Feed connections that ended.", replica, registry=registry
        )
        self.task_failures = TaskMetrics(registry).task_failures

        self._compared = Counter(
            "kvist_router_compared_tokens_total",
            "Tokens of requests whose reuse was predicted and reported: as predicted, and as found.",
            [names.LABEL_REPLICA, "of"],
            registry=registry,
        )
        self.trust = Gauge(
            "kvist_router_view_trust",
            "Share of the predicted reuse that is found at the replica; below 0.7 its view is believed less.",
            replica,
            registry=registry,
        )
        self.neighbours = Gauge(
            "kvist_router_neighbours",
            "Other routers of the cluster: those whose dispatches are heard, and those that are unheard.",
            [names.LABEL_STATE],
            registry=registry,
        )
        self._shadow_choices = Counter(
            "kvist_router_shadow_choices_total",
            "Choices of shadow policies: the same replica as was taken, or another.",
            ["policy", "choice"],
            registry=registry,
        )
        self._shadow_seconds = Counter(
            "kvist_router_shadow_ttft_seconds_total",
            "TTFT of streamed requests that a shadow policy would have sent elsewhere: actual, as predicted, "
            "and as predicted elsewhere.",
            ["policy", "of"],
            registry=registry,
        )

        # Finding a labelled series costs more than counting in it; bounded by the replicas there are.
        self._sent: dict[str, Counter] = {}

    def sent(self, replica: str) -> None:
        """Count a decision for a replica."""
        series = self._sent.get(replica)
        if series is None:
            series = self._sent[replica] = self.decisions.labels(replica)
        series.inc()

    def shadow_choice(self, policy: str, same: bool) -> None:
        """Count what a shadow policy said."""
        self._shadow_choices.labels(policy, "same" if same else "other").inc()

    def shadow_seconds(self, policy: str, actual: float, predicted: float, elsewhere: float) -> None:
        """Count a request that a shadow policy would have sent elsewhere."""
        for of, seconds in (("actual", actual), ("predicted", predicted), ("elsewhere", elsewhere)):
            self._shadow_seconds.labels(policy, of).inc(seconds)

    def compared(self, replica: str, predicted: int, found: int) -> None:
        """Count a prediction and what became of it."""
        self._compared.labels(replica, "predicted").inc(predicted)
        self._compared.labels(replica, "found").inc(found)

    def remote_tokenize(self, reason: str) -> None:
        """Count a fallback; `reason` is from the closed list of NotExact."""
        self._remote.labels(reason).inc()

    def forget(self, replica: str) -> None:
        """Drop the series of a replica that was removed, or label values would pile up."""
        self._sent.pop(replica, None)
        for metric in (self.decisions, self.healthy, self.feed, self.feed_breaks, self.breaker, self.trust):
            metric.remove(replica)
        for of in ("predicted", "found"):
            self._compared.remove(replica, of)
        self.reuse.forget(replica)
