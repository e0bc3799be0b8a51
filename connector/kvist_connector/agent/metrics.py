"""Prometheus metrics of one agent, in a registry of its own. Names start with kvist_agent_.

Gauges and counters are read from the agent's state at scrape time; only histograms are fed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist_connector import names
from kvist_connector.agent.parts import Parts
from kvist_connector.protocol.tiers import Tier

STALL_SAMPLE_SECONDS = 1.0
_STALL_SAMPLES = 300


class Metrics:
    """Registry and the few things that are measured as they happen."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._stalls: deque[float] = deque(maxlen=_STALL_SAMPLES)
        self._tier_seconds = Histogram(
            "kvist_agent_tier_operation_seconds",
            "Duration of one operation of a lower tier",
            [names.LABEL_TIER, names.LABEL_OPERATION, names.LABEL_OUTCOME],
            registry=self.registry,
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )

    def meter(self, tier: Tier) -> Callable[[str, str, int, float], None]:
        """A meter for `tiers.metered`."""

        def observe(operation: str, outcome: str, size: int, seconds: float) -> None:
            self._tier_seconds.labels(tier.label, operation, outcome).observe(seconds)

        return observe

    def watch(self, parts: Parts) -> None:
        """Read these at every scrape."""
        self.registry.register(_StateCollector(parts, self.stall_p99))

    def exposition(self) -> bytes:
        """Text format 0.0.4."""
        return generate_latest(self.registry)

    def stall_p99(self) -> float:
        """Seconds the loop was late, 99th percentile of the last minutes."""
        if not self._stalls:
            return 0.0
        ordered = sorted(self._stalls)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]

    async def sample_stalls(self) -> None:
        """Background task: one timer a second, whose lateness is the loop's stall."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + STALL_SAMPLE_SECONDS
            await asyncio.sleep(STALL_SAMPLE_SECONDS)
            self._stalls.append(max(0.0, loop.time() - due))


class _StateCollector(Collector):
    def __init__(self, parts: Parts, stall: Callable[[], float]) -> None:
        self._core = parts.core
        self._lower = parts.lower
        self._writebehind = parts.writebehind
        self._gpu = parts.gpu
        self._feed = parts.feed
        self._stall = stall

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._tiers()
        yield from self._gauges()
        events = CounterMetricFamily(
            "kvist_agent_events", "Things that happened, by kind", labels=[names.LABEL_REASON]
        )
        for counts in (
            self._core.counts,
            self._core.quotas.counts,
            self._core.loader.counts,
            self._writebehind.counts,
        ):
            for reason, count in counts.items():
                events.add_metric([reason], count)
        yield events
        errors = CounterMetricFamily(
            "kvist_agent_tier_events",
            "Events of a lower tier, by kind",
            labels=[names.LABEL_TIER, names.LABEL_REASON],
        )
        for tier, lower in self._lower.items():
            for reason, count in lower.counts.items():
                errors.add_metric([tier.label, reason], count)
        yield errors

    def _tiers(self) -> Iterator[Metric]:
        chunks = GaugeMetricFamily("kvist_agent_tier_chunks", "Chunks in a tier", labels=[names.LABEL_TIER])
        size = GaugeMetricFamily("kvist_agent_tier_bytes", "Bytes in a tier", labels=[names.LABEL_TIER])
        for tier in (Tier.MEMORY, *self._lower):
            index = self._core.catalog.index(tier)
            chunks.add_metric([tier.label], len(index))
            size.add_metric([tier.label], index.bytes)
        yield chunks
        yield size
        answers = GaugeMetricFamily(
            "kvist_agent_tier_answers", "0 while a tier below memory has a problem", labels=[names.LABEL_TIER]
        )
        for tier, lower in self._lower.items():
            answers.add_metric([tier.label], int(not lower.problem))
        yield answers
        yield from self._codings()
        slots = GaugeMetricFamily(
            "kvist_agent_slots", "Slots of the arena by state", labels=[names.LABEL_STATE]
        )
        table = self._core.memory.slots
        for state, count in (table.counts() if table is not None else {}).items():
            slots.add_metric([state], count)
        yield slots

    def _codings(self) -> Iterator[Metric]:
        on = GaugeMetricFamily(
            "kvist_agent_tier_compresses",
            "1 while chunks are compressed, by the rule or as auto has found it faster",
            labels=[names.LABEL_TIER],
        )
        ratio = GaugeMetricFamily(
            "kvist_agent_tier_compression_ratio",
            "Stored by raw bytes of the chunks compressed lately",
            labels=[names.LABEL_TIER],
        )
        rates = GaugeMetricFamily(
            "kvist_agent_tier_coding_bytes_per_second",
            "What compression is decided by, of one chunk: write, unpack, read_plain and read_packed",
            labels=[names.LABEL_TIER, names.LABEL_OPERATION],
        )
        for tier, lower in self._lower.items():
            state = lower.coding.state
            on.add_metric([tier.label], int(state.compresses))
            ratio.add_metric([tier.label], state.ratio)
            rates.add_metric([tier.label, "write"], state.write_bytes_per_second)
            rates.add_metric([tier.label, "unpack"], state.unpack_bytes_per_second)
            rates.add_metric([tier.label, "read_plain"], state.plain_read_bytes_per_second)
            rates.add_metric([tier.label, "read_packed"], state.packed_read_bytes_per_second)
        yield from (on, ratio, rates)

    def _gauges(self) -> Iterator[Metric]:
        core = self._core
        for name, text, value in (
            ("connections", "Open engine connections", len(core.sessions)),
            ("leases", "Leases on chunks", sum(session.leases.chunks for session in core.sessions)),
            ("feed_readers", "Open feed streams", self._feed.readers),
            ("pending_loads", "Requests waiting for lower tiers", core.loader.pending),
            ("write_behind_pending_bytes", "Bytes not yet written", self._writebehind.pending_bytes),
            ("gpu_prefixes", "Prefix keys known on the GPU", len(self._gpu)),
            ("draining", "1 while this replica is being drained", int(core.draining)),
            ("gpu_known", "1 when GPU residency is known", int(self._gpu.known)),
            ("loop_stall_p99_seconds", "How late the event loop was, 99th percentile", self._stall()),
        ):
            yield GaugeMetricFamily("kvist_agent_" + name, text, value=value)
