"""What became of a decision: reports of the relay, records of the connector, and their comparison.

Called by mind/mind.py. Predictions are checked here: a request whose prompt the engine saw with
other tokens moves the model to asking the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvist_connector.protocol.engine import RequestRecord
from kvist_router.metrics import MindMetrics
from kvist_router.mind.inflight import InFlight, InFlightMap
from kvist_router.mind.interface import Report
from kvist_router.mind.prompts import PromptSource
from kvist_router.mind.records import DecisionRecord, Records, actual
from kvist_router.mind.replica import Replica
from kvist_router.mind.reuse_metrics import Whose

_log = logging.getLogger(__name__)


class Outcomes:
    """Keeps in-flight figures, records and metrics in step."""

    def __init__(
        self,
        records: Records,
        in_flight: InFlightMap,
        metrics: MindMetrics,
        source: PromptSource,
        clock: Callable[[], float],
    ) -> None:
        self._records = records
        self._in_flight = in_flight
        self._metrics = metrics
        self._source = source
        self._clock = clock

    def report(self, request_id: str, report: Report) -> None:
        """Take a report of the relay; unknown ids are ignored."""
        entry = self._in_flight.get(request_id)
        if entry is None:
            return
        if report.event == "first_byte":
            self._first_byte(entry)
        else:
            self._end(entry, report)

    def recorded(self, replica: Replica, record: RequestRecord) -> None:
        """Take the connector's record of a request; those of other routers' requests are theirs to count."""
        entry = self._in_flight.get(record.request)
        if entry is not None and entry.replica is replica:
            self._in_flight.prefilled(entry, self._clock())
        if replica.doubt_gpu(record):
            _log.warning(
                "%s reuses from its GPU, but its feed knows of nothing there: the engine's KV events do not "
                "reach the agent; the endpoints of --kv-events-config and --kv-events must be one",
                replica.name,
            )
        decision = self._records.running(record.request)
        if decision is None or decision.replica != replica.name:
            return
        decision.actual = actual(replica.name, record)
        self._count(replica, record, decision)
        if decision.last_chunk_key:
            self._feed_back(replica, decision, record)
        if decision.last_chunk_key and decision.tokens_from == "local":
            self._compare(decision, record)

    def _first_byte(self, entry: InFlight) -> None:
        now, decision = self._clock(), self._records.running(entry.id)
        streamed = decision is not None and decision.streamed
        self._in_flight.first_byte(entry, now if streamed else None)
        seconds = now - entry.decided
        entry.replica.approximate.add(entry.keys)
        if decision is not None:
            decision.ttft = seconds
            # Without streaming the first byte comes after the whole answer; short prompts are all overhead.
            for policy, other in entry.elsewhere.items() if decision.streamed else ():
                self._metrics.shadow_seconds(policy, seconds, entry.predicted_ttft, other.predicted_ttft)
            # Waiting for KV space says nothing of how fast it computes.
            long = entry.uncached_tokens >= entry.replica.chunk_tokens
            if decision.streamed and long and not entry.waits_for_space:
                entry.replica.observed(entry.predicted_ttft, seconds)

    def _end(self, entry: InFlight, report: Report) -> None:
        self._in_flight.end(entry.id)
        computed = entry.first_byte and report.event != "failed"
        if not computed or not entry.replica.mirrored(self._clock()):
            entry.replica.pending.drop(entry.computes, entry.id)
        if computed:
            entry.replica.held(self._clock() - (entry.answering_since or entry.decided))
        if report.unreachable:
            entry.replica.unreachable(report.error)
        decision = self._records.running(entry.id)
        if decision is not None:
            decision.outcome, decision.error = report.event, report.error
            decision.duration = self._clock() - entry.decided

    def _count(self, replica: Replica, record: RequestRecord, decision: DecisionRecord) -> None:
        metrics, reused, speeds = self._metrics, sum(record.hit_tokens.values()), replica.speeds
        whose = Whose(decision.model, metrics.admission.label(decision.tenant), replica.name)
        token_bytes = speeds.chunk_bytes / replica.chunk_tokens
        metrics.reuse.count(whose, record, reused >= replica.chunk_tokens, token_bytes)
        if speeds.measured:
            whole = speeds.prefill.seconds(0, record.prompt_tokens)
            metrics.reuse.seconds(whose, whole, speeds.prefill.seconds(0, reused) - record.load_seconds)

    def _feed_back(self, replica: Replica, decision: DecisionRecord, record: RequestRecord) -> None:
        """Predicted against actual reuse: a view that goes on claiming too much is believed less."""
        predicted, found = decision.predicted_tokens, sum(record.hit_tokens.values())
        if predicted < replica.chunk_tokens:
            return
        self._metrics.compared(replica.name, predicted, found)
        if replica.trust.compared(predicted, found):
            _log.warning(
                "%s: its engine finds %.0f %% of what its view claims; the view is believed to that share",
                replica.name,
                100 * replica.trust.share,
            )

    def _compare(self, decision: DecisionRecord, record: RequestRecord) -> None:
        same_length = decision.prompt_tokens == record.prompt_tokens
        if same_length and decision.last_chunk_key == record.last_chunk_key.hex():
            return
        self._metrics.mismatches.inc()
        self._source.distrust(
            f"request {record.request}: the engine saw {record.prompt_tokens} tokens, "
            f"the router rendered {decision.prompt_tokens}; the engine tokenizes such prompts from now on",
            frozenset(decision.beyond_plain),
        )
